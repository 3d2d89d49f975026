"""Mixtures of experts in C++ against their definitions, for every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.experts import Choice, Scoring, padded_rows, reference
from kernels.experts.native import (
    PairsBuffer,
    combine_op,
    experts_linear_op,
    route_op,
    sort_pairs_op,
)
from kernels.experts.reference import EXPERT_ROWS
from kernels.linear import PackedLinear
from kernels.linear.pack import PANEL
from kernels.native.library import Library
from tests.support.native import native_library

pytestmark = pytest.mark.matrix

assert EXPERT_ROWS == PANEL, "experts begin with a panel"
DTYPES = [torch.float32, torch.bfloat16]
CHOICES = {
    "softmax": Choice(3),
    "normalised": Choice(3, normalised=True),
    "of chosen": Choice(3, Scoring.SOFTMAX_OF_CHOSEN),
    "sigmoid": Choice(3, Scoring.SIGMOID, normalised=True, scale=2.5),
    "groups": Choice(3, Scoring.SIGMOID, num_groups=4, num_chosen_groups=2),
    "softmax, groups": Choice(2, num_groups=4, num_chosen_groups=1),
    "all": Choice(20, normalised=True),
}
EXPERTS, MOST = 20, 70


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def routed(
    library: Library, logits: torch.Tensor, choice: Choice, *vectors: torch.Tensor | None
) -> PairsBuffer:
    """Routes all rows with room for more."""
    num_tokens, num_experts = logits.shape
    out = PairsBuffer.allocate(MOST, num_experts, choice.num_chosen)
    count = torch.tensor([num_tokens], dtype=torch.int32)
    padded = torch.cat([logits, torch.full((MOST - num_tokens, num_experts), torch.nan)])
    library.run(route_op(padded, choice, out, count, *vectors), sort_pairs_op(out, count))
    return out


def check_pairs(found: PairsBuffer, num_tokens: int) -> None:
    """Pairs must be exactly the definition's, of the experts that were found."""
    expected = reference.sort_pairs(found.experts[:num_tokens], found.num_experts)
    num_pairs = len(expected.tokens)
    assert found.num_pairs.tolist() == [num_pairs]
    assert torch.equal(found.pairs.tokens[:num_pairs], expected.tokens)
    assert torch.equal(found.pairs.starts, expected.starts)
    assert torch.equal(found.pairs.rows[:num_tokens], expected.rows)


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, MOST])
@pytest.mark.parametrize("has_vectors", [False, True])
def test_routing(library, case, num_tokens, has_vectors):
    logits, choice = numbers(num_tokens, EXPERTS), CHOICES[case]
    bias = scales = None
    if has_vectors:
        scales = numbers(EXPERTS, seed=1)
        bias = None if "chosen" in case else numbers(EXPERTS, seed=2)
    found = routed(library, logits, choice, bias, scales)
    expected = reference.route(logits, choice, bias, scales)
    assert torch.equal(found.experts[:num_tokens], expected.experts)
    torch.testing.assert_close(found.weights[:num_tokens], expected.weights)
    check_pairs(found, num_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 5, MOST])
@pytest.mark.parametrize("own", [(0, 3), (3, EXPERTS), (7, 8)])
def test_pairs_of_some_experts(library, dtype, num_tokens, own):
    """Of others nothing is added."""
    logits, choice, count = numbers(MOST, EXPERTS), CHOICES["groups"], torch.tensor([num_tokens])
    out = PairsBuffer.allocate(MOST, own[1] - own[0], choice.num_chosen)
    count = count.int()
    library.run(route_op(logits, choice, out, count), sort_pairs_op(out, count, own[0]))
    routing = reference.route(logits[:num_tokens], choice)
    assert torch.equal(out.experts[:num_tokens], routing.experts)
    whole = reference.sort_pairs(routing.experts, EXPERTS)
    expected = reference.own_pairs(whole, own)
    num_pairs = len(expected.tokens)
    assert out.num_pairs.tolist() == [num_pairs]
    assert torch.equal(out.pairs.starts, expected.starts)
    assert torch.equal(out.pairs.tokens[:num_pairs], expected.tokens)
    rows = expected.rows.where(expected.rows < num_pairs, -1)
    assert torch.equal(out.pairs.rows[:num_tokens], rows)
    x = numbers(MOST * choice.num_chosen, 37).to(dtype)
    x[num_pairs:] = torch.nan
    combined = torch.empty(MOST, 37, dtype=dtype)
    library.run(combine_op(x, out, combined, count))
    wanted = reference.combine(x[:num_pairs], expected, routing.weights)
    torch.testing.assert_close(combined[:num_tokens], wanted)


@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=8, max_size=8), max_size=30),
    st.sampled_from([Choice(1), Choice(3), Choice(8), Choice(2, Scoring.SOFTMAX_OF_CHOSEN)]),
)
@settings(deadline=None)
def test_equal_logits(rows, choice):
    library = native_library()
    logits = torch.tensor(rows, dtype=torch.float32).view(-1, 8)
    found = routed(library, logits, choice)
    assert torch.equal(found.experts[: len(rows)], reference.route(logits, choice).experts)
    check_pairs(found, len(rows))


def test_logits_that_are_no_numbers_choose_experts_that_there_are(library):
    found = routed(library, torch.full((3, EXPERTS), torch.nan), Choice(3))
    assert ((found.experts >= 0) & (found.experts < EXPERTS)).all()
    check_pairs(found, 3)


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("place", [0, 7, EXPERTS - 1])
def test_one_logit_that_is_no_number_makes_its_token_so(library, case, place):
    """Whatever experts it would choose without: others are as they are."""
    logits, choice = numbers(3, EXPERTS), CHOICES[case]
    expected = reference.route(logits, choice)
    logits[1, place] = torch.nan
    found = routed(library, logits, choice)
    assert found.weights[1].isnan().any()
    for row in (0, 2):
        assert torch.equal(found.experts[row], expected.experts[row])
        torch.testing.assert_close(found.weights[row], expected.weights[row])
    check_pairs(found, 3)


def packed_experts(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    num_experts, num_out, num_in = weight.shape
    step = padded_rows(num_out)
    packed = PackedLinear.empty(
        num_experts * step, num_in, has_bias=bias is not None, dtype=weight.dtype
    )
    for expert, rows in enumerate(weight):
        packed.put_rows(expert * step, rows)
        if bias is not None:
            packed.put_bias(expert * step, bias[expert])
    return packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 64), (2, 33), (101, 47), (96, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(library, assert_close, dtype, size_in, size_out, has_bias):
    weight = numbers(EXPERTS, size_out, size_in).to(dtype)
    bias = numbers(EXPERTS, size_out).to(dtype) if has_bias else None
    packed = packed_experts(weight, bias)
    for num_tokens, skew in ((0, 0), (1, 0), (3, 9), (MOST, 0), (MOST, 9)):
        logits = numbers(num_tokens, EXPERTS)
        logits[:, 1] += skew  # nearly all choose one expert, whose rows fill several tiles
        routing = routed(library, logits, Choice(3))
        num_pairs = int(routing.num_pairs)
        x = numbers(MOST * 3, size_in).to(dtype)
        out = torch.full((MOST * 3, size_out), torch.nan, dtype=dtype)
        library.run(experts_linear_op(x, packed, out, routing))
        assert out[num_pairs:].isnan().all()
        if num_pairs:
            expected = reference.experts_linear(x[:num_pairs], weight, routing.pairs, bias)
            ratio = 3e-3 if dtype == torch.bfloat16 else 1e-6
            assert_close(f"T={num_tokens}", expected, out[:num_pairs], ratio)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_has_the_same_bits_alone_and_in_any_batch(library, dtype):
    packed = packed_experts(numbers(EXPERTS, 80, 300).to(dtype), None)
    x, logits = numbers(MOST, 300).to(dtype), numbers(MOST, EXPERTS)

    def made(tokens: list[int]) -> dict[tuple[int, int], torch.Tensor]:
        routing = routed(library, logits[tokens], Choice(3))
        num_pairs = int(routing.num_pairs)
        rows = x[tokens][routing.pairs.tokens[:num_pairs]]
        out = torch.zeros(num_pairs, 80, dtype=dtype)
        library.run(experts_linear_op(rows, packed, out, routing))
        return {
            (token, expert): out[row]
            for token, rows, experts in zip(
                tokens, routing.pairs.rows.tolist(), routing.experts.tolist(), strict=False
            )
            for row, expert in zip(rows, experts, strict=True)
        }

    whole = made(list(range(MOST)))
    for tokens in ([5], [69, 5, 7], list(range(30))):
        for key, row in made(tokens).items():
            assert torch.equal(row, whole[key])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["none", "ungated", "gated"])
@pytest.mark.parametrize("size", [16, 37])
def test_combining(library, dtype, shared, size):
    num_tokens = 9
    routing = routed(library, numbers(num_tokens, EXPERTS), Choice(3))
    x = numbers(num_tokens * 3, size).to(dtype)
    out = numbers(num_tokens, size, seed=1).to(dtype)
    logits = numbers(num_tokens, 1) if shared == "gated" else None
    pairs = routing.pairs._replace(rows=routing.pairs.rows[:num_tokens])
    expected = reference.combine(
        x, pairs, routing.weights[:num_tokens], None if shared == "none" else out, logits
    )
    count = torch.tensor([num_tokens], dtype=torch.int32)
    own = None if shared == "none" else out
    library.run(combine_op(x, routing, out, count, own, logits))
    torch.testing.assert_close(out, expected)
