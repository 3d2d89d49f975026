"""The Triton kernels of mixtures, run by Triton's interpreter, against the definitions; and
compiled for sm_80 and sm_90 without a GPU."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.experts import Choice, Pairs, Scoring, reference
from tests.support.pairs import in_turns, pairwise

DTYPES = [torch.float32, torch.float16]
RATIOS = {torch.float32: 1e-6, torch.float16: 4e-4}
CHOICES = {
    "softmax": Choice(3),
    "normalised": Choice(3, normalised=True),
    "of chosen": Choice(3, Scoring.SOFTMAX_OF_CHOSEN),
    "sigmoid": Choice(3, Scoring.SIGMOID, normalised=True, scale=2.5),
    "groups": Choice(3, Scoring.SIGMOID, num_groups=4, num_chosen_groups=2),
    "softmax, groups": Choice(2, num_groups=4, num_chosen_groups=1),
    "all groups": Choice(3, num_groups=4, num_chosen_groups=4),
    "all": Choice(20, normalised=True),
}
EXPERTS, MOST = 20, 70
FEW = {"many_pairs": 1, "count_block": 16, "count_chunk": 8, "count_block_e": 4, "scan_block": 32}
"""Constants with which few pairs are counted as many are, in several blocks of everything."""
CLASSES = {
    "short": {},
    "middle": {"experts_short": {"max_pairs": 1}},
    "long": {"experts_short": {"max_pairs": 1}, "experts_middle": {"max_pairs": 1}},
}
"""Constants with which tiles are as long as those of so many pairs."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def chosen_experts(num_tokens: int, num_chosen: int = 3, skew: float = 0.0) -> torch.Tensor:
    """Returns experts, int32 [T, num_chosen]; with skew nearly all have the second."""
    logits = numbers(num_tokens, EXPERTS)
    logits[:, 1] += skew
    return reference.route(logits, Choice(num_chosen)).experts


@pytest.mark.parametrize(
    ("case", "has_vectors"), in_turns([(case,) for case in CHOICES], [False, True])
)
def test_routing(interpreter, case, has_vectors):
    logits, choice = numbers(17, EXPERTS), CHOICES[case]
    bias = scales = None
    if has_vectors:
        scales = numbers(EXPERTS, seed=1)
        bias = None if "chosen" in case else numbers(EXPERTS, seed=2)
    found = interpreter.call("route", logits, choice, bias, scales)
    expected = reference.route(logits, choice, bias, scales)
    assert found.experts.dtype == torch.int32
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights)


@pytest.mark.parametrize("num_experts", [1, 8, 1000, reference.MAX_EXPERTS])
def test_routing_among_few_and_many(interpreter, num_experts):
    logits, choice = numbers(3, num_experts), Choice(min(8, num_experts), Scoring.SIGMOID)
    found = interpreter.call("route", logits, choice)
    expected = reference.route(logits, choice)
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights)


@given(
    st.lists(
        st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0]), min_size=8, max_size=8),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([Choice(1), Choice(3), Choice(8), Choice(2, Scoring.SOFTMAX_OF_CHOSEN)]),
)
@settings(deadline=None, max_examples=20)
def test_of_equal_logits_the_first_experts_are_chosen(interpreter, rows, choice):
    logits = torch.tensor(rows)
    found = interpreter.call("route", logits, choice)
    assert torch.equal(found.experts, reference.route(logits, choice).experts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("case", ["softmax", "groups"])
def test_logits_that_are_no_numbers_choose_experts_that_there_are(interpreter, value, case):
    logits = torch.full((2, EXPERTS), value)
    logits[1, :EXPERTS:2] = 1.0
    experts = interpreter.call("route", logits, CHOICES[case]).experts
    assert ((experts >= 0) & (experts < EXPERTS)).all()
    assert all(len({*row}) == len(row) for row in experts.tolist())


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("place", [0, 7, EXPERTS - 1])
def test_one_logit_that_is_no_number_makes_its_token_so(interpreter, case, place):
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(0))
    expected = reference.route(logits, CHOICES[case])
    logits[1, place] = torch.nan
    found = interpreter.call("route", logits, CHOICES[case])
    assert found.weights[1].isnan().any()
    assert torch.equal(found.experts[::2], expected.experts[::2])
    torch.testing.assert_close(found.weights[::2], expected.weights[::2])


def check_pairs(found: Pairs, experts: torch.Tensor, num_experts: int, *order) -> None:
    expected = reference.sort_pairs(experts, num_experts, *order)
    for name, one, other in zip(Pairs._fields[:3], found[:3], expected[:3], strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name


@pytest.mark.parametrize("constants", [{}, FEW], ids=["ranked", "counted"])
@pytest.mark.parametrize("num_tokens", [0, 1, MOST])
@pytest.mark.parametrize("skew", [0.0, 9.0])
def test_pairs_are_sorted(interpreter, num_tokens, skew, constants):
    experts = chosen_experts(num_tokens, skew=skew)
    found = interpreter.call("sort_pairs", experts, EXPERTS, **constants)
    check_pairs(found, experts, EXPERTS)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 9).flatmap(
        lambda num_experts: st.tuples(
            st.just(num_experts),
            st.integers(1, 4).flatmap(
                lambda num_chosen: st.lists(
                    st.tuples(*[st.integers(0, num_experts - 1)] * num_chosen),
                    min_size=1,
                    max_size=40,
                )
            ),
        )
    ),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.booleans(),
)
def test_any_pairs_are_sorted(interpreter, case, random, has_order, is_counted):
    num_experts, rows = case
    experts = torch.tensor(rows, dtype=torch.int32)
    order = [torch.tensor(random.sample(range(len(rows)), len(rows)))] if has_order else []
    found = interpreter.call(
        "sort_pairs", experts, num_experts, *order, **(FEW if is_counted else {})
    )
    check_pairs(found, experts, num_experts, *order)


@pairwise(
    dtype=DTYPES,
    tiles=list(CLASSES),
    sizes=[(64, 64), (2, 33), (101, 47), (160, 136)],
    has_bias=[False, True],
    batch=[(1, 0), (3, 9), (MOST, 0), (MOST, 9)],
)
def test_products(interpreter, assert_close, dtype, sizes, has_bias, tiles, batch):
    """`batch`: so many tokens, and how much more often than others they have one expert."""
    size_in, size_out = sizes
    weight = numbers(EXPERTS, size_out, size_in).to(dtype)
    bias = numbers(EXPERTS, size_out).to(dtype) if has_bias else None
    num_tokens, skew = batch
    pairs = reference.sort_pairs(chosen_experts(num_tokens, skew=skew), EXPERTS)
    x = numbers(num_tokens * 3, size_in).to(dtype)
    args = (x, weight, pairs, bias)
    found = interpreter.call("experts_linear", *args, constants=CLASSES[tiles])
    assert_close("out", reference.experts_linear(*args), found, RATIOS[dtype])


@pytest.mark.parametrize("own", [(0, 3), (3, EXPERTS), (EXPERTS - 1, EXPERTS)])
@pytest.mark.parametrize("tiles", CLASSES)
@pytest.mark.parametrize("skew", [0.0, 9.0])
def test_experts_of_one_rank(interpreter, assert_close, own, tiles, skew):
    """All pairs have places, and of other experts nothing is computed or added."""
    experts, weights = chosen_experts(MOST, skew=skew), numbers(MOST, 3)
    whole, weight = reference.sort_pairs(experts, EXPERTS), numbers(EXPERTS, 40, 48)[slice(*own)]
    found, expected = interpreter.call("own_pairs", whole, own), reference.own_pairs(whole, own)
    num_own, num_pairs = len(expected.tokens), len(whole.tokens)
    assert found.first_expert == expected.first_expert == own[0]
    assert torch.equal(found.starts, expected.starts)
    assert torch.equal(found.tokens[:num_own], expected.tokens)
    assert found.tokens.min() >= 0, "any token may be read"
    assert found.tokens.max() < MOST
    assert torch.equal(found.rows, expected.rows.where(expected.rows < num_own, num_pairs))
    x = numbers(num_pairs, 48)
    made = interpreter.call("experts_linear", x, weight, found, constants=CLASSES[tiles])
    products = reference.experts_linear(x[:num_own], weight, expected)
    assert_close("products", products, made[:num_own], RATIOS[torch.float32])
    made[num_own:] = torch.nan
    summed = interpreter.call("combine", made, found, weights)
    assert_close("sum", reference.combine(products, expected, weights), summed, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_gathered_rows(interpreter, assert_close, dtype):
    weight, x = numbers(EXPERTS, 48, 64).to(dtype), numbers(MOST, 64).to(dtype)
    pairs = reference.sort_pairs(chosen_experts(MOST), EXPERTS)
    found = interpreter.call("experts_linear", x, weight, pairs, None, pairs.tokens)
    gathered = interpreter.call("experts_linear", x[pairs.tokens], weight, pairs)
    assert torch.equal(found, gathered)
    assert_close(
        "out", reference.experts_linear(x[pairs.tokens], weight, pairs), found, RATIOS[dtype]
    )


def test_experts_may_lie_apart(interpreter, assert_close):
    slab, x = numbers(EXPERTS, 2 * 48 + 16, 64), numbers(MOST * 3, 64)
    pairs = reference.sort_pairs(chosen_experts(MOST), EXPERTS)
    found = interpreter.call("strided_experts_linear", x, slab, 48, pairs)
    assert_close("out", reference.experts_linear(x, slab[:, :48], pairs), found, 1e-6)


def test_no_pairs(interpreter):
    pairs = reference.sort_pairs(torch.zeros(0, 3, dtype=torch.int32), EXPERTS)
    found = interpreter.call("experts_linear", numbers(0, 8), numbers(EXPERTS, 4, 8), pairs)
    assert found.shape == (0, 4)
    routing = interpreter.call("route", numbers(0, EXPERTS), Choice(3))
    assert interpreter.call("combine", found, pairs, routing.weights).shape == (0, 4)


@pytest.mark.parametrize(
    ("tiles", "dtype"),
    [("short", torch.float32), ("middle", torch.float16), ("long", torch.float32)],
    ids=str,
)
def test_a_pair_has_the_same_bits_alone_and_in_any_batch(interpreter, tiles, dtype):
    """That they are the same in tiles of another length is the tensor cores' doing: those of numpy
    are not. tests/gpu has that."""
    weight, x = numbers(EXPERTS, 80, 140).to(dtype), numbers(MOST, 140).to(dtype)
    experts, constants = chosen_experts(MOST), CLASSES[tiles]

    def made(tokens: list[int]) -> dict[tuple[int, int], torch.Tensor]:
        pairs = reference.sort_pairs(experts[tokens], EXPERTS)
        out = interpreter.call(
            *("experts_linear", x[tokens], weight, pairs, None, pairs.tokens), constants=constants
        )
        return {
            (token, expert): out[row]
            for token, rows, chosen in zip(
                tokens, pairs.rows.tolist(), experts[tokens].tolist(), strict=True
            )
            for row, expert in zip(rows, chosen, strict=True)
        }

    whole = made(list(range(MOST)))
    few = [[5], [5, 69]] if tiles == "short" else []
    for tokens in ([69, 5, *range(7, 40)], list(reversed(range(MOST))), *few):
        for key, row in made(tokens).items():
            assert torch.equal(row, whole[key]), key


@pairwise(dtype=DTYPES, shared=["none", "ungated", "gated"], sizes=[(3, 16), (1, 37), (8, 1500)])
def test_combining(interpreter, dtype, shared, sizes):
    num_tokens, (num_chosen, size) = 9, sizes
    routing = reference.route(numbers(num_tokens, EXPERTS), Choice(num_chosen))
    pairs = reference.sort_pairs(routing.experts, EXPERTS)
    x = numbers(num_tokens * num_chosen, size).to(dtype)
    own = None if shared == "none" else numbers(num_tokens, size, seed=1).to(dtype)
    logits = numbers(num_tokens, 1) if shared == "gated" else None
    args = (x, pairs, routing.weights, own, logits)
    torch.testing.assert_close(interpreter.call("combine", *args), reference.combine(*args))


STEPS = {"decode": 1, "many rows": 128, "a prompt": 512, "a long prompt": 2048}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("step", STEPS)
def test_products_load_vectors_and_use_tensor_cores(compiler, capability, step, dtype):
    ptx = compiler.call("compile_ptx", capability, dtype, STEPS[step])
    linear = ptx["experts_linear"]
    assert "cp.async" in linear, "the loads of the inner loop overlap its products"
    assert not re.search(r"cp\.async\.ca", linear), "16 bytes each"
    assert not re.search(r"ld\.global(?:\.\w+)*\.[bu]16", linear), "nothing element by element"
    instruction = r"wgmma\.mma_async" if capability == 90 else r"mma\.sync"
    assert re.search(instruction, linear), "few pairs and many use the same"
    for direction in ("ld", "st"):
        combine = ptx["combine_experts"]
        assert re.search(rf"{direction}\.global(?:\.\w+)*\.v4\.b32", combine), direction
        assert not re.search(rf"{direction}\.global(?:\.\w+)*\.[bu]16", combine), direction


def test_fp32_compiles_without_reduced_precision(compiler):
    for num_tokens in STEPS.values():
        ptx = compiler.call("compile_ptx", 90, torch.float32, num_tokens)
        assert not any("tf32" in kernel for kernel in ptx.values())


def test_a_few_steps_compile_whatever_any_launches(compiler):
    """Tiles that begin with pairs or with experts, of three lengths; pairs that are compared, or
    counted."""
    sizes = compiler.call("sizes_to_warm_up", 3000, 128, 8, 2)
    assert sizes[0] == 1
    assert len(sizes) == 5
    found = compiler.call("count_compilations", 80, sizes)
    assert found.pop("experts_linear") == 4
    assert found == dict.fromkeys(found, 1)
    others = [2, 3, 8, 100, 128, 200, 511, 512, 600, 1000, 2048, 3000]
    again = compiler.call("count_compilations", 80, [*sizes, *others])
    assert again.pop("experts_linear") == 4
    assert again == found
