"""Mixtures of experts against their definitions: routing, pairs, products, sums, and plans of what
adapters add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor

from kernels import experts, lora, tuning
from kernels.elementwise import clamped_swiglu
from kernels.elementwise import reference as elementwise_reference
from kernels.experts import Choice, Pairs, Scoring, reference
from kernels.lora import BASE_SLOT, LoraPlan, LoraTable, pair_plan

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.real),
]
CHOICES = {
    "softmax": Choice(4, normalised=True),
    "of chosen": Choice(4, Scoring.SOFTMAX_OF_CHOSEN),
    "groups": Choice(4, Scoring.SIGMOID, num_groups=4, num_chosen_groups=2, scale=2.5),
}
EXPERTS = 16
CLASSES = ("short", "middle", "long")
FEW_PAIRS = 1
"""On average of each expert, more than which make tiles of another length if they are told to."""


def numbers(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def routed(device: torch.device, num_tokens: int, num_experts: int = EXPERTS) -> Pairs:
    """Returns pairs of experts of which one has many."""
    logits = numbers(device, num_tokens, num_experts)
    logits[:, 1] += 2.0
    return experts.sort_pairs(experts.route(logits, Choice(4)).experts, num_experts)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Returns the relative RMS of the difference."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    difference = (found.double() - wanted.double()).square().mean().sqrt()
    return float(difference / wanted.double().square().mean().sqrt())


@contextmanager
def tiles_of(name: str) -> Iterator[None]:
    """While it lasts, few pairs are multiplied in tiles as long as those of many."""
    with ExitStack() as stack:
        for shorter in CLASSES[: CLASSES.index(name)]:
            stack.enter_context(tuning.overridden(f"experts_{shorter}", max_pairs=FEW_PAIRS))
        yield


@pytest.mark.smoke
@pytest.mark.parametrize("case", CHOICES)
def test_routing(device, on_device, case):
    logits, choice = numbers(device, 33, EXPERTS), CHOICES[case]
    bias = None if case == "of chosen" else numbers(device, EXPERTS)
    with on_device():
        found = experts.route(logits, choice, bias)
    wanted = reference.route(logits, choice, bias)
    assert torch.equal(found.experts, wanted.experts)
    torch.testing.assert_close(found.weights, wanted.weights)


@pytest.mark.smoke
@pytest.mark.parametrize("many_pairs", [16, 1024], ids=["counted", "ranked"])
@pytest.mark.parametrize("has_order", [False, True])
def test_pairs_are_sorted(device, on_device, has_order, many_pairs):
    chosen = reference.route(numbers(device, 90, EXPERTS), Choice(4)).experts
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).to(device)
    args = (chosen, EXPERTS, order if has_order else None)
    with on_device(), tuning.overridden("sort_pairs", many_pairs=many_pairs):
        found = experts.sort_pairs(*args)
    expected = reference.sort_pairs(*args)
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(one, other)
    with on_device():
        check_own_pairs(found, (EXPERTS // 4, EXPERTS // 2))


def check_own_pairs(pairs, own):
    """The device has places for all pairs, and the definition for those there are."""
    found, expected = experts.own_pairs(pairs, own), reference.own_pairs(pairs, own)
    num_own, num_pairs = len(expected.tokens), len(pairs.tokens)
    assert torch.equal(found.starts, expected.starts)
    assert torch.equal(found.tokens[:num_own], expected.tokens)
    rows = expected.rows.where(expected.rows < num_own, num_pairs)
    assert torch.equal(found.rows, rows)
    assert found.first_expert == expected.first_expert == own[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", CLASSES)
def test_products(device, on_device, tiles, dtype):
    weight, bias = (numbers(device, EXPERTS, *n, dtype=dtype) for n in ((80, 200), (80,)))
    for num_tokens in (1, 70):
        x = numbers(device, num_tokens, 200, dtype=dtype)
        with on_device(), tiles_of(tiles):
            pairs = routed(device, num_tokens)
            found = experts.experts_linear(x, weight, pairs, bias, pairs.tokens)
        wanted = reference.experts_linear(x, weight, pairs, bias, pairs.tokens)
        assert relative(found, wanted) < TOLERANCES[dtype]


@pytest.mark.real
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 32, 128, 577, 2048])
def test_products_of_a_model(device, num_tokens, dtype):
    """Of 128 experts, of which each token has 4."""
    weight = numbers(device, 128, 768, 1024, dtype=dtype)
    x, pairs = numbers(device, num_tokens, 1024, dtype=dtype), routed(device, num_tokens, 128)
    found = experts.experts_linear(x, weight, pairs, rows=pairs.tokens)
    wanted = reference.experts_linear(x, weight, pairs, rows=pairs.tokens)
    assert relative(found, wanted) < TOLERANCES[dtype]


@pytest.mark.real
def test_more_elements_than_32_bits_count(device):
    """Weights of the last experts lie behind 2 ** 31 elements."""
    weight = torch.empty(70, 8192, 4096, dtype=torch.bfloat16, device=device)
    assert weight.numel() > 1 << 31
    weight[-1].normal_()
    chosen = torch.full((3, 1), 69, dtype=torch.int32, device=device)
    pairs, x = experts.sort_pairs(chosen, 70), numbers(device, 3, 4096, dtype=torch.bfloat16)
    wanted = reference.experts_linear(x, weight, pairs)
    assert relative(experts.experts_linear(x, weight, pairs), wanted) < TOLERANCES[x.dtype]


@pytest.mark.real
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_pair_has_the_same_bits_in_tiles_of_any_length(device, dtype):
    """The interpreter shows that other rows do not matter in tests/kernels/experts."""
    weight, x = (numbers(device, *n, dtype=dtype) for n in ((EXPERTS, 256, 1000), (300, 1000)))
    chosen = reference.route(numbers(device, 300, EXPERTS), Choice(4)).experts

    def made(tokens: Sequence[int]) -> Tensor:
        """Returns [tokens, 4, out]."""
        pairs = experts.sort_pairs(chosen[list(tokens)].contiguous(), EXPERTS)
        out = experts.experts_linear(x[list(tokens)], weight, pairs, None, pairs.tokens)
        return out[pairs.rows.long()]

    whole = made(range(300))
    for tiles in CLASSES:
        with tiles_of(tiles):
            for tokens in ([7], range(40), list(reversed(range(300)))):
                assert torch.equal(made(tokens), whole[list(tokens)]), (tiles, len(tokens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
def test_sums(device, on_device, is_shared, dtype):
    num_tokens = 9
    x, shared = (numbers(device, n, 300, dtype=dtype) for n in (num_tokens * 4, num_tokens))
    weights, gate = numbers(device, num_tokens, 4), numbers(device, num_tokens, 1)
    with on_device():
        pairs = routed(device, num_tokens)
        args = (x, pairs, weights, *((shared, gate) if is_shared else ()))
        found = experts.combine(*args)
    assert relative(found, reference.combine(*args)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_swiglu(device, on_device, dtype):
    gate, up = (4 * numbers(device, 5, 600, dtype=dtype)).chunk(2, dim=1)
    with on_device():
        found = clamped_swiglu(gate, up, 1.702, 7.0)
    wanted = elementwise_reference.clamped_swiglu(gate, up, 1.702, 7.0)
    assert relative(found, wanted) < TOLERANCES[dtype]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "lengths", [[1] * 5, [90, 1, 3, 1, 70]], ids=["decode rows", "rows of any length"]
)
def test_plans_of_pairs(device, on_device, lengths):
    arena = torch.zeros(1024, device=device)
    table = LoraTable.create(3, 1, arena, device, max_rank=8)
    step = LoraPlan.build([2, BASE_SLOT, 0, 2, 1], lengths, table, device)
    chosen = reference.route(numbers(device, sum(lengths), EXPERTS), Choice(4)).experts
    with on_device():
        order = lora.order_tokens(step)
        pairs = experts.sort_pairs(chosen, EXPERTS, order.tokens)
        found = lora.plan_pairs(step, order, chosen, pairs)
    wanted_order = pair_plan.order_tokens(step)
    wanted = pair_plan.plan_pairs(step, wanted_order, chosen, pairs)
    assert torch.equal(order.tokens, wanted_order.tokens)
    for name in ("items", "token_slots", "token_experts"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.real
def test_a_recorded_mixture_follows_its_routing(device):
    """One graph serves any experts: nothing of them is read by the host."""
    num_tokens, weight = 24, numbers(device, EXPERTS, 64, 128, dtype=torch.bfloat16)
    logits, x = numbers(device, num_tokens, EXPERTS), numbers(device, num_tokens, 128).bfloat16()

    def compute() -> Tensor:
        routing = experts.route(logits, Choice(4))
        pairs = experts.sort_pairs(routing.experts, EXPERTS)
        made = experts.experts_linear(x, weight, pairs, rows=pairs.tokens)
        return experts.combine(made, pairs, routing.weights)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for seed in range(3):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        logits[:, seed] += 9.0 * seed
        graph.replay()
        assert torch.equal(out, compute())
