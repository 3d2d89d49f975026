"""Multi-adapter LoRA over one arena: `add_lora`, `add_lora_experts` and `add_lora_embedding` on CPU
or CUDA.

README.md beside this file describes the memory layout and the launches.

cpu             two products per segment and target, on views made at an adapter's first use
native          LoRA in C++, as operations of a program over a plan that is refilled every step
pair_plan       plans of pairs of tokens and experts, which are known on the device alone
plan            which tokens of one step use which slot, and which expert
reference       the definition: plain torch, fp32, a loop over tokens and targets
table           where each adapter's A and B lie in the arena
triton_kernels  the Triton kernels: shrink or gather to the rank, then expand to the outputs
triton_ops      their launches; grids follow from the plan's sizes alone
"""

from __future__ import annotations

import torch

from kernels.dispatch import uses_triton
from kernels.experts.reference import Pairs

from . import cpu, pair_plan
from .pair_plan import TokenOrder
from .plan import BASE_SLOT, LoraGroup, LoraPlan, LoraSegment
from .table import (
    GRANULE_BYTES,
    LoraTable,
    OutputVectors,
    ReplacedWeight,
    TableEntry,
    TableRow,
)

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
) -> None:
    """out[t, o_k : o_k + n_k] += scale * (x[t] @ A_k.T) @ B_k, and what there is of vectors over
    the outputs; see `reference.add_lora`."""
    assert not plan.has_experts
    _add_lora(out, x, arena, table, plan, group, base_bias)


def add_lora_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """out[t, o_k : o_k + n_k] += scale * (x[t] @ A_k[e].T) @ B_k[e], of t's expert e; see
    `reference.add_lora_experts`."""
    assert plan.has_experts, "each token has an expert"
    _add_lora(out, x, arena, table, plan, group)


def _add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None = None,
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

        launch(out, x, arena, table, plan, group, base_bias)
    else:
        cpu.add_lora(out, x, table, plan, group, base_bias)


def add_lora_embedding(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    target: int,
) -> None:
    """out[t] += scale * A[token_ids[t]] @ B; see `reference.add_lora_embedding`."""
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
    """See `pair_plan.order_tokens`."""
    if uses_triton(plan.token_slots):
        from . import triton_ops

        return triton_ops.order_tokens(plan, num_slots)
    return pair_plan.order_tokens(plan, num_slots)


def plan_pairs(plan: LoraPlan, order: TokenOrder, experts: torch.Tensor, pairs: Pairs) -> LoraPlan:
    """See `pair_plan.plan_pairs`."""
    if uses_triton(experts):
        from . import triton_ops

        return triton_ops.plan_pairs(plan, order, experts, pairs)
    return pair_plan.plan_pairs(plan, order, experts, pairs)


def _count() -> None:
    global _num_calls
    _num_calls += 1
