"""Launches of the Triton kernels. Grids and shapes follow from the plan's sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels import tuning

from . import triton_kernels as kernels
from .plan import TILE_TOKENS, LoraGroup, LoraPlan
from .table import GRANULE_BYTES, LoraTable


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """See `reference.add_lora`. Two launches for all targets of the group."""
    assert out.shape[1] >= group.out_end, "out holds every column of the group"
    assert out.stride(1) == x.stride(1) == 1, "rows are contiguous"
    if len(plan.items) == 0:
        return
    num_targets, tuned = len(group.targets), tuning.constants("shrink")
    # Chunks are added in order: having programs of their own, so that few tokens fill the device,
    # changes no number.
    chunk, is_split = tuned["chunk"], plan.num_tokens <= tuned["split_tokens"]
    num_splits = -(-group.in_features // chunk) if is_split else 1
    y = torch.empty(
        (num_splits, plan.num_tokens, num_targets, _y_rank(table)),
        dtype=torch.float32,
        device=x.device,
    )
    kernels.shrink_kernel[(len(plan.items), num_targets * num_splits)](
        y,
        x,
        arena,
        table.rows,
        plan.items,
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
    _expand(out, y, None, arena, table, plan, group)


def add_lora_embedding(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    target: int,
) -> None:
    """See `reference.add_lora_embedding`. One launch: the shrunk rows are rows of A."""
    assert out.stride(1) == 1, "rows are contiguous"
    assert token_ids.is_contiguous()
    if len(plan.items) == 0:
        return
    group = LoraGroup((target,), 0, (0,), (out.shape[1],))
    _expand(out, None, token_ids, arena, table, plan, group)


def _expand(
    out: torch.Tensor,
    y: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    tuned = tuning.constants("expand")
    num_blocks = sum(-(-width // tuned["block_n"]) for width in group.out_features)
    kernels.expand_kernel[(len(plan.items), num_blocks)](
        out,
        y,
        token_ids,
        arena,
        table.rows,
        plan.items,
        group.targets[0],
        plan.num_tokens,
        out.stride(0),
        TARGET_STEPS=_steps(group),
        OUT_OFFSETS=group.out_offsets,
        OUT_FEATURES=group.out_features,
        BLOCK_N=tuned["block_n"],
        SPLITS=1 if y is None else y.shape[0],
        **_common(arena, table, plan, tuned),
    )


def _steps(group: LoraGroup) -> tuple[int, ...]:
    """Targets relative to the first: the same in every layer, so one compilation serves all."""
    return tuple(target - group.targets[0] for target in group.targets)


def _y_rank(table: LoraTable) -> int:
    """The workspace holds whole blocks of ranks."""
    kernels = (tuning.constants(name) for name in ("shrink", "expand"))
    block = max(tuned[name] for tuned in kernels for name in ("block_r", "tile_block_r"))
    return -(-table.max_rank // block) * block


def _common(
    arena: torch.Tensor, table: LoraTable, plan: LoraPlan, tuned: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "Y_RANK": _y_rank(table),
        "TABLE_TARGETS": table.num_targets,
        "GRANULE": GRANULE_BYTES // arena.itemsize,
        "HAS_TILES": plan.has_tiles,
        "BLOCK_M": TILE_TOKENS,
        "BLOCK_R": tuned["block_r"],
        "TILE_BLOCK_R": tuned["tile_block_r"],
        # fp32 models are promised fp32 products; for 16-bit ones the choice has no effect.
        "PRECISION": "ieee",
        "num_warps": tuned["num_warps"],
        "num_stages": tuned["num_stages"],
    }
