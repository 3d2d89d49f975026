"""The Triton operations of LoRA as tests/support/kernels/worker.py runs them."""

from __future__ import annotations

from typing import Any

import torch

from kernels import tuning
from kernels.experts import Pairs
from kernels.experts import triton_ops as experts_ops
from kernels.lora import LoraGroup, LoraPlan, LoraTable, TokenOrder, triton_kernels, triton_ops
from tests.support.kernels.worker import CompileOnly, NoDevice


def add_lora(
    out: torch.Tensor, x: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup,
    expand: dict[str, int] | None = None, **shrink: int,
) -> torch.Tensor:  # fmt: skip
    """The new `out`; `shrink` and `expand` override constants of the kernels for this call."""
    with tuning.overridden("shrink", **shrink), tuning.overridden("expand", **expand or {}):
        triton_ops.add_lora(out, x, table.arena, table, plan, group)
    return out


def compute_addend(
    values: torch.Tensor, x: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup,
    expand: dict[str, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    with tuning.overridden("expand", **expand or {}):
        triton_ops.compute_addend(values, x, table.arena, table, plan, group)
    return values


def add_lora_unrounded(
    out: torch.Tensor, x: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup
) -> torch.Tensor:
    with tuning.overridden("beside", most_rows=0):
        triton_ops.add_lora(out, x, table.arena, table, plan, group)
    return out


def add_lora_vectors(
    out: torch.Tensor, x: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup,
    base_bias: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    triton_ops.add_lora(out, x, table.arena, table, plan, group, base_bias)
    return out


def add_lora_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> torch.Tensor:
    triton_ops.add_lora_embedding(out, token_ids, table.arena, table, plan, target)
    return out


def half(
    name: str, first: torch.Tensor, table: LoraTable, plan: LoraPlan, *args: Any
) -> torch.Tensor:
    """What shrink (first: x) or gather (token ids) returns, or the new `out` (first) of expand."""
    if name == "expand":
        y, *rest = args
        triton_ops.expand(first, y, table.arena, table, plan, *rest)
        return first
    y: torch.Tensor = getattr(triton_ops, name)(first, table.arena, table, plan, *args)
    return y


def plan_pairs(
    plan: LoraPlan,
    experts: torch.Tensor,
    num_experts: int,
    num_slots: int | None,
    own: tuple[int, int] | None = None,
    **tuned: int,
) -> tuple[TokenOrder, Pairs, LoraPlan]:
    """All that is planned on a device for one mixture, or for some of its experts."""
    order = triton_ops.order_tokens(plan, num_slots)
    pairs = experts_ops.sort_pairs(experts, num_experts, order.tokens)
    if own is not None:
        pairs = experts_ops.own_pairs(pairs, own)
    with tuning.overridden("plan_pairs", **tuned):
        return order, pairs, triton_ops.plan_pairs(plan, order, experts, pairs)


def compile_launches(
    capability: int,
    dtype: torch.dtype,
    in_features: int,
    out_features: tuple[int, ...],
    row_lengths: list[int],
    first_target: int = 1,
    has_experts: bool = False,
    is_float8: bool = False,
) -> dict[str, Any]:
    """What add_lora, add_lora_embedding and gather launch for such a step on sm_`capability`,
    compiled; with experts, what add_lora launches for a mixture's."""
    from triton.runtime import driver

    driver.set_active(NoDevice(capability))
    arena = torch.zeros(1024, dtype=dtype)
    lora_dtype = torch.float8_e4m3fn if is_float8 else dtype
    table = LoraTable.create(4, 224, arena, "cpu", max_rank=64, lora_dtype=lora_dtype)
    rows = [0] * len(row_lengths)
    plan = LoraPlan.build(rows, row_lengths, table, "cpu", rows if has_experts else None)
    offsets = tuple(sum(out_features[:k]) for k in range(len(out_features)))
    targets = tuple(range(first_target, first_target + len(offsets)))
    group = LoraGroup(targets, in_features, offsets, out_features)
    x = torch.zeros(plan.num_tokens, in_features, dtype=dtype)
    out = torch.zeros(plan.num_tokens, group.out_end, dtype=dtype)
    names = ("shrink_kernel", "gather_kernel", "expand_kernel")
    kernels = {name: getattr(triton_kernels, name) for name in names}
    only = {name: CompileOnly(kernel) for name, kernel in kernels.items()}
    vars(triton_kernels).update(only)
    try:
        triton_ops.add_lora(out, x, arena, table, plan, group)
        if not has_experts:
            triton_ops.add_lora_embedding(out, plan.token_slots, arena, table, plan, 0)
            triton_ops.gather(plan.token_slots, arena, table, plan, 0)
    finally:
        vars(triton_kernels).update(kernels)
    compiled = {name.removesuffix("_kernel"): each.compiled for name, each in only.items()}
    found = {name: launches[0] for name, launches in compiled.items() if launches}
    return found if has_experts else found | {"embedding": compiled["expand"][1]}


def compile_ptx(*args: Any, **kwargs: Any) -> dict[str, str]:
    return {name: kernel.asm["ptx"] for name, kernel in compile_launches(*args, **kwargs).items()}


def count_compilations(*args: Any, first_targets: list[int], steps: list[list[int]]) -> int:
    """Different shrink and expand kernels over layers and steps, given by their row lengths."""
    launches = [
        compile_launches(*args, row_lengths, first_target)
        for first_target in first_targets
        for row_lengths in steps
    ]
    return len({id(launch[name]) for launch in launches for name in ("shrink", "expand")})


OPERATIONS = {
    f.__name__: f
    for f in (
        *(
            add_lora,
            compute_addend,
            add_lora_unrounded,
            add_lora_vectors,
            add_lora_embedding,
            half,
            plan_pairs,
        ),
        *(compile_ptx, count_compilations),
    )
}
