"""The definition of the LoRA operations: plain torch, fp32, a loop over tokens and targets.

Every fast implementation must agree with these up to the rounding of the model's dtype. They read
only what the kernels read: the arena, the table's rows and the plan's token slots.
"""

from __future__ import annotations

import torch

from .plan import BASE_SLOT, LoraGroup, LoraPlan
from .table import GRANULE_BYTES, LoraTable


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
) -> None:
    """
    Semantics, for every token t with slot s >= 0 and every k with rank[s, targets[k]] = r > 0:
      out[t, o_k : o_k + n_k] += scale * (x[t] @ A.T) @ B

    Args:
      out: Shape: `[T, >= group.out_end]`. In place; rounded once, when added.
      x: Shape: `[T, in_features]`. Same dtype as `out`; must not share memory with it.
      arena: Shape: `[arena_bytes // itemsize]`. Same dtype. Holds A `[r, in_features]` and
        B `[r, n_k]` at the table's granules.
      table: Rows of the slots in `plan`.
      plan: Tokens t = 0..T-1 by slot; rows without an adapter stay bitwise as they are.
      group: The targets k, their columns o_k and n_k, and in_features.
    """
    for t, slot in enumerate(plan.token_slots.tolist()):
        if slot == BASE_SLOT:
            continue
        for target, o, n in zip(group.targets, group.out_offsets, group.out_features, strict=True):
            rank = int(table.ranks[slot, target])
            if rank == 0:
                continue
            a = _read(arena, table.a_granules[slot, target], rank, group.in_features)
            y = a @ x[t].float()  # [rank]
            _add(out[t, o : o + n], y, arena, table, slot, target)


def add_lora_embedding(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    target: int,
) -> None:
    """
    Semantics, for every token t with slot s >= 0 and rank[s, target] = r > 0:
      out[t] += scale * A[token_ids[t]] @ B

    Args:
      out: Shape: `[T, out_features]`. In place; rounded once, when added.
      token_ids: Shape: `[T]`. Integers in [0, vocab).
      arena: Shape: `[arena_bytes // itemsize]`. Holds A `[vocab, r]` and B `[r, out_features]`.
      table: Rows of the slots in `plan`.
      plan: Tokens by slot.
      target: The embedding's index in the table.
    """
    for t, slot in enumerate(plan.token_slots.tolist()):
        rank = 0 if slot == BASE_SLOT else int(table.ranks[slot, target])
        if rank == 0:
            continue
        start = _start(arena, table.a_granules[slot, target]) + int(token_ids[t]) * rank
        _add(out[t], arena[start : start + rank].float(), arena, table, slot, target)


def _add(
    out: torch.Tensor,
    y: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    slot: int,
    target: int,
) -> None:
    """out += scale * y @ B, in fp32. out: [n], y: [rank]."""
    b = _read(arena, table.b_granules[slot, target], len(y), len(out))
    out.copy_(out.float() + float(table.scales[slot, target]) * (y @ b))


def _read(arena: torch.Tensor, granule: torch.Tensor, rank: int, num_features: int) -> torch.Tensor:
    start = _start(arena, granule)
    return arena[start : start + rank * num_features].view(rank, num_features).float()


def _start(arena: torch.Tensor, granule: torch.Tensor) -> int:
    return int(granule) * (GRANULE_BYTES // arena.itemsize)
