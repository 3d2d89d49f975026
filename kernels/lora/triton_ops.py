"""Launches of the Triton kernels. Grids and shapes follow from the plan's sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kernels import tuning
from kernels.experts import Pairs

from . import triton_kernels as kernels
from .cpu import SumRanks
from .pair_plan import TokenOrder, max_items
from .plan import ROWS_TOKENS, TILE_TOKENS, LoraGroup, LoraPlan
from .rows import GRANULE_BYTES
from .table import MAX_PARTS, LoraTable, workspace_rank


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
    """Launches `reference.add_lora`, or `reference.add_lora_experts` for a plan with experts: out
    [T, >= group.out_end], x [T, in_features], arena [arena_bytes // itemsize], base_bias
    [>= group.out_end]. Two launches for all targets of the group. With `sum_ranks` others follow
    the first: the sum of chunks, and the sum over ranks."""
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    y = shrink(x, arena, table, plan, group)
    if sum_ranks is not None:
        y = _summed(y, sum_ranks)
    expand(out, y, arena, table, plan, group, base_bias)


def _summed(y: torch.Tensor, sum_ranks: SumRanks) -> torch.Tensor:
    """Returns the sum over ranks of shrunk rows `[S, P, T, K, Y_RANK]`, as `[1, P, T, K, Y_RANK]`:
    all ranks have as many rows, because their plans and the ranks of their adapters are equal. What
    is undefined stays undefined. Chunks are added first, so that ranks exchange less."""
    if len(y) > 1:
        y = y.sum(dim=0, keepdim=True)
    sum_ranks(y)
    return y


def compute_addend(
    values: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """Launches `kernels.lora.compute_addend`: values [T, group.out_end], x [T, in_features], arena
    [arena_bytes // itemsize]. Two launches for all targets of the group."""
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    y = shrink(x, arena, table, plan, group)
    _expand(values, y, None, None, arena, table, plan, group, is_beside=True)


def add_lora_embedding(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    target: int,
) -> None:
    """Launches `reference.add_lora_embedding` once: out [T, out_features], token_ids integers [T],
    arena [arena_bytes // itemsize]. The shrunk rows are rows of A. If A and B are of one rank,
    expand reads them there."""
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    group = LoraGroup((target,), 0, (0,), (out.shape[1],))
    _expand(out, None, token_ids, None, arena, table, plan, group)


def shrink(
    x: torch.Tensor, arena: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup
) -> torch.Tensor:
    """Launches `reference.shrink`: x `[T, in_features]` and arena `[arena_bytes // itemsize]` give
    y `[S, P, T, K, Y_RANK]`, to be summed over S, with P parts of a mix, or 1. Beyond A's rank y is
    0 up to the end of a block of ranks, and undefined after it."""
    assert x.stride(1) == 1, "rows are contiguous"
    num_targets, tuned = len(group.targets), tuning.constants("shrink")
    # Chunks are added in order: having programs of their own, so that few tokens fill the device,
    # changes no number.
    chunk, is_split = tuned["chunk"], plan.num_tokens <= tuned["split_tokens"]
    if plan.has_mixes and plan.has_tiles:
        is_split = False  # reading the splits of several parts would take too many registers
    num_splits = -(-group.in_features // chunk) if is_split else 1
    y = _shrunk(num_splits, table, plan, num_targets)
    if len(plan.items) == 0:
        return y
    kernels.shrink_kernel[(len(plan.items), num_targets * num_splits)](
        y,
        x,
        arena,
        table.rows,
        plan.items,
        plan.order,
        group.targets[0],
        plan.num_tokens,
        x.stride(0),
        TARGET_STEPS=_steps(group),
        IN=group.in_features,
        CHUNK=chunk,
        BLOCK_K=tuned["block_k"],
        TILE_BLOCK_K=tuned["tile_block_k"],
        SPLITS=num_splits,
        **_common(arena, table, plan, tuned),
    )
    return y


def gather(
    token_ids: torch.Tensor, arena: torch.Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> torch.Tensor:
    """Launches `reference.gather`: token_ids `[T]` and arena `[arena_bytes // itemsize]` give y
    `[1, 1, T, 1, Y_RANK]`, as `shrink`."""
    assert token_ids.is_contiguous()
    assert not plan.has_experts
    assert not plan.has_mixes, "expand looks up the rows of each part"
    tuned = tuning.constants("expand")
    y = _shrunk(1, table, plan, 1)
    if len(plan.items) == 0:
        return y
    kernels.gather_kernel[(len(plan.items),)](
        y,
        token_ids,
        arena,
        table.rows,
        plan.items,
        plan.order,
        target,
        TABLE_TARGETS=table.num_targets,
        GRANULE=GRANULE_BYTES // arena.itemsize,
        Y_RANK=_y_rank(table),
        BLOCK_M=TILE_TOKENS if plan.has_tiles else ROWS_TOKENS,
        BLOCK_R=tuned["tile_block_r"],
        FLOAT8=table.is_float8,
        num_warps=tuned["num_warps"],
    )
    return y


def expand(
    out: torch.Tensor,
    y: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None = None,
) -> None:
    """Launches `reference.expand`: out `[T, >= group.out_end]`, arena `[arena_bytes // itemsize]`,
    base_bias `[>= group.out_end]`. y is `[S, P, T, K, Y_RANK]`; beyond B's rank it is 0 up to the
    end of a block of ranks."""
    tokens = (plan.num_tokens, len(group.targets), _y_rank(table))
    assert y.shape[1:] == (_num_parts(plan), *tokens)
    assert y.is_contiguous()
    _expand(out, y, None, base_bias, arena, table, plan, group)


def _expand(
    out: torch.Tensor,
    y: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    base_bias: torch.Tensor | None,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    *,
    is_beside: bool = False,
) -> None:
    assert out.shape[1] >= group.out_end, "out holds every column of the group"
    assert out.stride(1) == 1, "rows are contiguous"
    assert token_ids is None or token_ids.is_contiguous()
    if len(plan.items) == 0:
        return
    tuned, y_rank = tuning.constants("expand"), _y_rank(table)
    widths = [-(-width // tuned["block_n"]) for width in group.out_features]
    # The products add 16 ranks at a time, in order: a block of all ranks changes no bit.
    is_whole = not plan.has_vectors and not plan.has_mixes and y_rank <= tuned["whole_ranks"]
    if is_whole:
        tuned = {**tuned, "block_r": y_rank}
    num_blocks, walks = 1, is_whole and not plan.has_tiles
    if walks:
        # Programs that walk several blocks look up their item once. Few items need more programs.
        num_blocks = len(plan.items) * sum(widths) // tuned["programs"]
        num_blocks = max(1, min(num_blocks, tuned["max_blocks"]))
    num_programs = sum(-(-width // num_blocks) for width in widths)
    kernels.expand_kernel[(len(plan.items), num_programs)](
        out,
        y,
        token_ids,
        base_bias if plan.has_vectors else None,
        arena,
        table.rows,
        plan.items,
        plan.order,
        group.targets[0],
        plan.num_tokens,
        out.stride(0),
        num_blocks,
        TARGET_STEPS=_steps(group),
        OUT_OFFSETS=group.out_offsets,
        OUT_FEATURES=group.out_features,
        BLOCK_N=tuned["block_n"],
        SPLITS=1 if y is None else y.shape[0],
        VECTORS=plan.has_vectors,
        WALK=walks,
        BESIDE=is_beside,
        ROUNDS=group.most_rows_beside(arena.itemsize) > 0,
        **_common(arena, table, plan, tuned),
    )


def _shrunk(num_splits: int, table: LoraTable, plan: LoraPlan, num_targets: int) -> torch.Tensor:
    shape = (num_splits, _num_parts(plan), plan.num_tokens, num_targets, _y_rank(table))
    return torch.empty(shape, dtype=torch.float32, device=table.arena.device)


def _num_parts(plan: LoraPlan) -> int:
    """Rows of y of each token: where there are mixes, one for each part that they may have."""
    return MAX_PARTS if plan.has_mixes else 1


def _steps(group: LoraGroup) -> tuple[int, ...]:
    """Targets relative to the first: the same in every layer, so one compilation serves all."""
    return tuple(target - group.targets[0] for target in group.targets)


def _y_rank(table: LoraTable) -> int:
    return workspace_rank(table.max_rank, tuning.constants("shrink"), tuning.constants("expand"))


def _common(
    arena: torch.Tensor, table: LoraTable, plan: LoraPlan, tuned: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "Y_RANK": _y_rank(table),
        "TABLE_TARGETS": table.num_targets,
        "GRANULE": GRANULE_BYTES // arena.itemsize,
        "HAS_TILES": plan.has_tiles,
        "EXPERTS": plan.has_experts,
        "FLOAT8": table.is_float8,
        "PARTS": _num_parts(plan),
        "FIRST_MIX": table.max_loras if plan.has_mixes else 0,
        "BLOCK_R": tuned["block_r"],
        "TILE_BLOCK_R": tuned["tile_block_r"],
        # fp32 models are promised fp32 products; for 16-bit ones the choice has no effect.
        "PRECISION": "ieee",
        "num_warps": tuned["num_warps"],
        "num_stages": tuned["num_stages"],
    }


def order_tokens(plan: LoraPlan, num_slots: int | None = None) -> TokenOrder:
    """See `pair_plan.order_tokens`. One launch, or two with tiles."""
    keys = 2 * plan.token_slots
    if plan.has_tiles and len(plan.items):
        kernels.mark_tiles_kernel[(len(plan.items),)](keys, plan.items, plan.order, num_warps=1)
    return TokenOrder.of(plan, keys, num_slots)


def plan_pairs(plan: LoraPlan, order: TokenOrder, experts: torch.Tensor, pairs: Pairs) -> LoraPlan:
    """Launches `pair_plan.plan_pairs` for experts int32 [T, num_chosen], without the segments,
    which only CPUs use. Two launches."""
    assert experts.is_contiguous()
    num_tokens, num_chosen = experts.shape
    assert num_tokens == plan.num_tokens
    num_pairs, num_experts = experts.numel(), len(pairs.starts) - 1
    num_items = max_items(plan, order, num_chosen, num_experts)
    slots, of_pairs, keys = (torch.empty_like(experts).flatten() for _ in range(3))
    items = torch.empty((num_items, 5), dtype=torch.int32, device=experts.device)
    planned = replace(
        plan,
        num_tokens=num_pairs,
        segments=(),
        token_slots=slots,
        items=items,
        order=None,
        token_experts=of_pairs,
    )
    if num_pairs == 0:
        return planned
    tuned = tuning.constants("plan_pairs")
    kernels.describe_pairs_kernel[(-(-num_pairs // tuned["block"]),)](
        slots,
        of_pairs,
        keys,
        items,
        order.keys,
        experts,
        pairs.rows,
        pairs.starts,
        num_pairs,
        num_items,
        LACKS_PAIRS=pairs.first_expert is not None,
        FIRST_EXPERT=pairs.first_expert or 0,
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=num_chosen,
        BLOCK=tuned["block"],
        num_warps=tuned["num_warps"],
    )
    kernels.plan_items_kernel[(-(-num_pairs // TILE_TOKENS),)](
        items,
        keys,
        of_pairs,
        num_pairs,
        num_items,
        CHUNK=tuned["chunk"],
        num_warps=tuned["num_warps"],
    )
    return planned
