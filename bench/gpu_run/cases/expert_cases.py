"""The steps of a mixture of experts of one layer, each with its definition; products also with
torch's kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_run.cases.family_cases import FamilyCase
from bench.gpu_run.cases.lora_cases import random
from bench.gpu_run.context import Context
from bench.gpu_run.sizes import Mixture
from kernels import elementwise, experts, lora, tuning
from kernels.elementwise import reference as elementwise_reference
from kernels.experts import Choice, Pairs, Routing, Scoring
from kernels.experts import reference as experts_reference
from kernels.lora import LoraPlan, LoraTable, TokenOrder, pair_plan

STD, NUM_CALLS = 0.02, 8
"""Each call of a measurement has its own routing, so that no cache holds the experts' weights."""
ALPHA, LIMIT = 1.702, 7.0
CHOICES: dict[str, dict[str, Any]] = {
    "routing": {},
    "routing by sigmoid, in groups": {
        "scoring": Scoring.SIGMOID,
        "normalised": True,
        "num_groups": 2,
        "num_chosen_groups": 1,
    },
}


def names(context: Context) -> list[str]:
    return list(_makers(context))


def make(context: Context, name: str) -> FamilyCase:
    return _makers(context)[name](name)


def torch_case(context: Context, name: str) -> FamilyCase | None:
    """Returns the same case with torch's kernel, if it has one."""
    product = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    found = _product_cases(context).get(name)
    return None if product is None or found is None else found(name, product=product)


def _makers(context: Context) -> dict[str, Callable[[str], FamilyCase]]:
    sizes = context.sizes
    found: dict[str, Callable[[str], FamilyCase]] = {}
    for num_tokens in (sizes.kernel_rows[-1], sizes.kernel_tokens[-1]):
        for kind, options in CHOICES.items():
            choice = Choice(sizes.mixture.num_chosen, **options)
            found[f"{kind}, {num_tokens} tokens"] = partial(_route, context, num_tokens, choice)
        for kind, maker in (
            ("pairs of experts", _sort),
            ("plans of pairs", _plan),
            ("sums of experts", _combine),
            ("clamped SwiGLU", _clamped),
        ):
            found[f"{kind}, {num_tokens} tokens"] = partial(maker, context, num_tokens)
    return found | _product_cases(context)


def _product_cases(context: Context) -> dict[str, Callable[..., FamilyCase]]:
    return {
        f"products of experts, {kind}, {num_tokens} tokens": partial(
            _products, context, num_tokens, kind
        )
        for num_tokens in product_tokens(context)
        for kind in ("gate and up", "down")
    }


def product_tokens(context: Context) -> list[int]:
    """Returns numbers of tokens, of decode rows and prompts, that make tiles of every length."""
    rows = context.sizes.kernel_rows
    return sorted({rows[0], rows[-2], rows[-1], *tokens_of_longer_tiles(context)})


def tokens_of_longer_tiles(context: Context) -> tuple[int, int]:
    """Returns the numbers of tokens that make middle and long tiles."""
    mixture, facts = context.sizes.mixture, {"itemsize": context.sizes.dtype.itemsize}
    per_pair = mixture.num_experts / mixture.num_chosen
    short = tuning.constants("experts_short", **facts)["max_pairs"]
    middle = tuning.constants("experts_middle", **facts)["max_pairs"]
    longest = max(context.sizes.kernel_tokens[-1], int(1.1 * middle * per_pair) + 1)
    return int(1.5 * short * per_pair) + 1, longest


@dataclass(frozen=True)
class Products:
    """Products of randomly routed tokens with one projection of all experts."""

    pairs: list[Pairs]
    """The pairs of each call."""
    weight: Tensor
    x: Tensor
    """[T, hidden], gathered, for gate and up; [P, intermediate] for down."""
    is_gathered: bool

    @classmethod
    def make(cls, context: Context, num_tokens: int, kind: str) -> Products:
        """Makes products with the same values every time."""
        num_experts, num_chosen, hidden, intermediate = context.sizes.mixture
        num_calls = min(NUM_CALLS, context.sizes.max_calls)
        chosen = (route_at_random(context, num_tokens, seed).experts for seed in range(num_calls))
        pairs = [experts.sort_pairs(each, num_experts) for each in chosen]
        if kind == "down":
            shape, x_shape = (hidden, intermediate), (num_tokens * num_chosen, intermediate)
        else:
            shape, x_shape = (2 * intermediate, hidden), (num_tokens, hidden)
        weight = random(context, num_experts, *shape).mul_(STD)
        return cls(pairs, weight, random(context, *x_shape), kind != "down")

    def ours(self, call: int) -> Tensor:
        return self._compute(experts.experts_linear, call)

    def wanted(self) -> Tensor:
        return self._compute(experts_reference.experts_linear, 0)

    def _compute(self, compute: Callable[..., Tensor], call: int) -> Tensor:
        pairs = self.pairs[call]
        return compute(self.x, self.weight, pairs, rows=pairs.tokens if self.is_gathered else None)


def route_at_random(context: Context, num_tokens: int, seed: int = 0) -> Routing:
    mixture, device = context.sizes.mixture, context.device
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_tokens, mixture.num_experts, generator=generator, device=device)
    return experts.route(logits, Choice(mixture.num_chosen, normalised=True))


def _of_experts(routing: Routing, mixture: Mixture) -> Tensor:
    """Returns weights [T, experts], 0 for experts that are not chosen. The order of equal weights
    has no effect."""
    chosen, weights = routing
    shape = (len(chosen), mixture.num_experts)
    return torch.zeros(shape, device=weights.device).scatter_(1, chosen.long(), weights)


def _route(context: Context, num_tokens: int, choice: Choice, name: str) -> FamilyCase:
    mixture = context.sizes.mixture
    logits = random(context, num_tokens, mixture.num_experts).float()

    def run() -> None:
        experts.route(logits, choice)

    return FamilyCase(
        name,
        run,
        lambda: _of_experts(experts.route(logits, choice), mixture),
        lambda: _of_experts(experts_reference.route(logits, choice), mixture),
    )


def _sort(context: Context, num_tokens: int, name: str) -> FamilyCase:
    num_experts = context.sizes.mixture.num_experts
    chosen = route_at_random(context, num_tokens).experts
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_tokens, generator=generator).to(context.device)

    def run() -> None:
        experts.sort_pairs(chosen, num_experts)

    def result(compute: Callable[..., Pairs]) -> Tensor:
        both = (compute(chosen, num_experts), compute(chosen, num_experts, order))
        return torch.cat([each.flatten().double() for pairs in both for each in pairs[:3]])

    return FamilyCase(
        name,
        run,
        partial(result, experts.sort_pairs),
        partial(result, experts_reference.sort_pairs),
    )


def make_plan(context: Context, num_tokens: int) -> LoraPlan:
    """Returns the plan of a prompt, and after it a row of one token for each adapter."""
    num_adapters = min(4, num_tokens - 1)
    arena = torch.zeros(1024, dtype=context.sizes.dtype, device=context.device)
    table = LoraTable.create(num_adapters + 1, 1, arena, context.device, max_rank=16)
    lengths = [num_tokens - num_adapters] + [1] * num_adapters
    return LoraPlan.build(range(num_adapters + 1), lengths, table, context.device)


def _plan(context: Context, num_tokens: int, name: str) -> FamilyCase:
    mixture, plan = context.sizes.mixture, make_plan(context, num_tokens)
    chosen = route_at_random(context, num_tokens).experts
    order = lora.order_tokens(plan, 1)
    pairs = experts.sort_pairs(chosen, mixture.num_experts, order.tokens)

    def run() -> None:
        lora.plan_pairs(plan, order, chosen, pairs)

    def result(ordered: TokenOrder, planned: LoraPlan) -> Tensor:
        assert planned.token_experts is not None
        made = [ordered.tokens, ordered.keys, planned.token_slots, planned.token_experts]
        return torch.cat([each.flatten().double() for each in (*made, planned.items)])

    def wanted() -> Tensor:
        ordered = pair_plan.order_tokens(plan, 1)
        of_all = experts_reference.sort_pairs(chosen, mixture.num_experts, ordered.tokens)
        return result(ordered, pair_plan.plan_pairs(plan, ordered, chosen, of_all))

    return FamilyCase(
        name, run, lambda: result(order, lora.plan_pairs(plan, order, chosen, pairs)), wanted
    )


def _combine(context: Context, num_tokens: int, name: str) -> FamilyCase:
    mixture = context.sizes.mixture
    routing = route_at_random(context, num_tokens)
    pairs = experts.sort_pairs(routing.experts, mixture.num_experts)
    x = random(context, num_tokens * mixture.num_chosen, mixture.hidden)
    shared = random(context, num_tokens, mixture.hidden)
    args = (x, pairs, routing.weights, shared, random(context, num_tokens, 1).float())

    def run() -> None:
        experts.combine(*args)

    return FamilyCase(
        name, run, partial(experts.combine, *args), partial(experts_reference.combine, *args)
    )


def _clamped(context: Context, num_tokens: int, name: str) -> FamilyCase:
    mixture = context.sizes.mixture
    num_pairs = num_tokens * mixture.num_chosen
    gate, up = random(context, num_pairs, 2 * mixture.intermediate).mul_(4).chunk(2, dim=1)
    args = (gate, up, ALPHA, LIMIT)

    def run() -> None:
        elementwise.clamped_swiglu(*args)

    return FamilyCase(
        name,
        run,
        partial(elementwise.clamped_swiglu, *args),
        partial(elementwise_reference.clamped_swiglu, *args),
    )


def _products(
    context: Context,
    num_tokens: int,
    kind: str,
    name: str,
    *,
    product: Callable[..., Tensor] | None = None,
) -> FamilyCase:
    """Makes the case of our product, or of torch's `product`, which needs gathered rows."""
    made = Products.make(context, num_tokens, kind)
    compute: Callable[[int], Tensor] = made.ours
    if product is not None:
        ends = [pairs.starts[1:].contiguous() for pairs in made.pairs]
        # Copies for each call would not fit, and any values will do.
        gathered = made.x[made.pairs[0].tokens] if made.is_gathered else made.x
        transposed = made.weight.transpose(1, 2)

        def compute(call: int) -> Tensor:
            return product(gathered, transposed, offs=ends[call])

    def run() -> None:
        for call in range(len(made.pairs)):
            compute(call)

    return FamilyCase(name, run, partial(compute, 0), made.wanted, len(made.pairs))
