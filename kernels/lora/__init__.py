"""Multi-adapter LoRA over one arena: `add_lora`, `compute_addend`, `add_lora_experts` and
`add_lora_embedding` on CPU or CUDA.

README.md beside this file describes the memory layout and the launches.

cpu             two products per segment and target, on views made at an adapter's first use
native          LoRA in C++, as operations of a program over a plan that is refilled every step
pair_plan       plans of pairs of tokens and experts, which are known on the device alone
plan            which tokens of one step use which slot, and which expert
reference       the definition: plain torch, fp32, a loop over tokens and targets
rows            rows of the table on the host: which numbers each target of an adapter has
table           where each adapter's A and B lie in the arena
triton_kernels  the Triton kernels: shrink or gather to the rank, then expand to the outputs
triton_items    their parts that read the plan and the table
triton_outputs  their parts that change a block of outputs
triton_ops      their launches; grids follow from the plan's sizes alone
views           an adapter's values as tensors, views into the arena
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.dispatch import uses_triton
from kernels.experts.reference import Pairs

from . import cpu, pair_plan
from .cpu import SumRanks
from .pair_plan import TokenOrder
from .plan import BASE_SLOT, LoraGroup, LoraPlan, LoraSegment
from .rows import GRANULE_BYTES, OutputVectors, ReplacedWeight, TableEntry, TableRow
from .table import LoraTable

__all__ = [
    "BASE_SLOT",
    "GRANULE_BYTES",
    "LoraGroup",
    "LoraPlan",
    "LoraSegment",
    "LoraTable",
    "OutputVectors",
    "ReplacedWeight",
    "TableEntry",
    "TableRow",
    "TokenOrder",
    "add_lora",
    "add_lora_embedding",
    "add_lora_experts",
    "begin_lora",
    "compute_addend",
    "end_lora",
    "num_calls",
    "order_tokens",
    "plan_pairs",
]

_num_calls = 0


def num_calls() -> int:
    """How often this process entered the LoRA path. A batch without adapters must not move it."""
    return _num_calls


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None = None,
    sum_ranks: SumRanks | None = None,
) -> None:
    """out[t, o_k : o_k + n_k] += scale * (x[t] @ A_k.T) @ B_k, with the adapter's vectors over the
    outputs, if it has any; see `reference.add_lora`.

    Args:
        out: [T, >= group.out_end], of the arena's dtype or float32. Gets the sum.
        x: [T, in_features] of the arena's dtype.
        arena: The adapters' bytes, [arena_bytes // itemsize]; `table.arena`.
        table: The adapters' rows.
        plan: Tokens by slot.
        group: Targets with the same input.
        base_bias: The base's bias in `out`, [>= group.out_end]. None: none.
        sum_ranks: Sums x[t] @ A_k.T over ranks, which have parts of the inputs, and then of the
            outputs. None: this rank has all inputs.
    """
    assert not plan.has_experts
    _add_lora(out, x, arena, table, plan, group, base_bias, sum_ranks)


def compute_addend(
    values: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """values[t, o_k : o_k + n_k] = scale * (x[t] @ A_k.T) @ B_k, rounded to their dtype, and 0 for
    targets that t's adapter lacks; without an adapter they are undefined. See `Addend`.

    Args:
        values: [T, group.out_end] of the arena's dtype, without gaps between targets.
        x: [T, in_features] of the arena's dtype.
        arena: The adapters' bytes, [arena_bytes // itemsize]; `table.arena`.
        table: The adapters' rows.
        plan: Tokens by slot. No adapter has vectors, and none is a mix.
        group: Targets with the same input.
    """
    assert not plan.has_experts
    assert not plan.has_vectors
    assert not plan.has_mixes
    assert x.shape == (plan.num_tokens, group.in_features), "x is [T, in_features]"
    assert values.shape == (plan.num_tokens, group.out_end)
    assert sum(group.out_features) == group.out_end, "targets cover all columns"
    assert arena is table.arena
    assert values.dtype == x.dtype == arena.dtype
    _count()
    if uses_triton(values):
        from .triton_ops import compute_addend as launch

        launch(values, x, arena, table, plan, group)
    else:
        cpu.add_lora(values.zero_(), x, table, plan, group)


def begin_lora(
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> Any:
    """Computes the part of `add_lora` that does not need its outputs, for `end_lora`.

    Args:
        x: [T, in_features] of the arena's dtype.
        arena: The adapters' bytes, [arena_bytes // itemsize]; `table.arena`.
        table: The adapters' rows.
        plan: Tokens by slot. No adapter has vectors, and none is a mix.
        group: Targets with the same input.

    Returns:
        The shrunk rows.
    """
    assert not plan.has_experts
    assert not plan.has_vectors
    assert not plan.has_mixes
    assert x.shape == (plan.num_tokens, group.in_features), "x is [T, in_features]"
    assert arena is table.arena
    _count()
    if uses_triton(x):
        from .triton_ops import shrink

        return shrink(x, arena, table, plan, group)
    return cpu.shrink(x, table, plan, group)


def end_lora(
    out: torch.Tensor,
    shrunk: Any,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """Computes the rest of `add_lora`.

    Args:
        out: [T, >= group.out_end], of the arena's dtype or float32. Gets the sum.
        shrunk: The result of `begin_lora`, with the same other arguments.
        arena: See `begin_lora`.
        table: See `begin_lora`.
        plan: See `begin_lora`.
        group: See `begin_lora`.
    """
    assert out.shape[0] == plan.num_tokens, "out is [T, sum of out]"
    if uses_triton(out):
        from .triton_ops import expand

        expand(out, shrunk, arena, table, plan, group)
    else:
        cpu.expand(out, shrunk, plan, group)


def add_lora_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    sum_ranks: SumRanks | None = None,
) -> None:
    """out[t, o_k : o_k + n_k] += scale * (x[t] @ A_k[e].T) @ B_k[e], with t's expert e; see
    `reference.add_lora_experts`.

    Args:
        out: [T, >= group.out_end], of the arena's dtype or float32. Gets the sum.
        x: [T, in_features] of the arena's dtype.
        arena: The adapters' bytes, [arena_bytes // itemsize]; `table.arena`.
        table: The adapters' rows.
        plan: Tokens by slot. Each token has an expert.
        group: Targets with the same input.
        sum_ranks: See `add_lora`.
    """
    assert plan.has_experts, "each token has an expert"
    _add_lora(out, x, arena, table, plan, group, None, sum_ranks)


def _add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None,
    sum_ranks: SumRanks | None,
) -> None:
    assert x.shape == (plan.num_tokens, group.in_features), "x is [T, in_features]"
    assert out.shape[0] == plan.num_tokens, "out is [T, sum of out]"
    assert arena is table.arena
    assert x.dtype == arena.dtype
    assert out.dtype in (arena.dtype, torch.float32)
    _count()
    if not plan.has_group(group):
        return
    if uses_triton(out):
        from .triton_ops import add_lora as launch  # Triton is an extra that the CPU does without

        launch(out, x, arena, table, plan, group, base_bias, sum_ranks)
    else:
        cpu.add_lora(out, x, table, plan, group, base_bias, sum_ranks)


def add_lora_embedding(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    target: int,
) -> None:
    """out[t] += scale * A[token_ids[t]] @ B; see `reference.add_lora_embedding`.

    Args:
        out: [T, out_features] of the arena's dtype. Gets the sum.
        token_ids: Integers [T] in [0, vocabulary).
        arena: The adapters' bytes, [arena_bytes // itemsize]; `table.arena`.
        table: The adapters' rows.
        plan: Tokens by slot.
        target: Index of the embedding in the table.
    """
    assert token_ids.shape == (plan.num_tokens,), "token_ids is [T]"
    assert out.shape[0] == plan.num_tokens, "out is [T, out]"
    assert arena is table.arena
    assert out.dtype == arena.dtype
    _count()
    if target not in plan.targets:
        return
    if uses_triton(out):
        from .triton_ops import add_lora_embedding as launch

        launch(out, token_ids, arena, table, plan, target)
    else:
        cpu.add_lora_embedding(out, token_ids, table, plan, target)


def order_tokens(plan: LoraPlan, num_slots: int | None = None) -> TokenOrder:
    """Sorts a step's tokens by slot; see `pair_plan.order_tokens`.

    Args:
        plan: The step's plan.
        num_slots: Most slots that rows of several tokens use. None: unknown.
    """
    if uses_triton(plan.token_slots):
        from . import triton_ops

        return triton_ops.order_tokens(plan, num_slots)
    return pair_plan.order_tokens(plan, num_slots)


def plan_pairs(plan: LoraPlan, order: TokenOrder, experts: torch.Tensor, pairs: Pairs) -> LoraPlan:
    """Plans a step's pairs of tokens and experts; see `pair_plan.plan_pairs`.

    Args:
        plan: The step's plan.
        order: Its tokens by slot.
        experts: int32 [T, num_chosen].
        pairs: The pairs, sorted in `order`.
    """
    if uses_triton(experts):
        from . import triton_ops

        return triton_ops.plan_pairs(plan, order, experts, pairs)
    return pair_plan.plan_pairs(plan, order, experts, pairs)


def _count() -> None:
    global _num_calls
    _num_calls += 1
