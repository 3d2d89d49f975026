"""LoRA for one step: the arena, the table, and which of the step's tokens use which row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.core import BASE_SLOT, BatchRow
from kernels.lora import LoraGroup, LoraPlan, add_lora, add_lora_embedding


@dataclass(frozen=True, slots=True)
class LoraStep:
    """What the decoder calls after each base projection; see `model.lora.Lora`.

    `plan` covers all tokens of the step, `head_plan` the rows that produce logits.
    """

    arena: Arena
    groups: Mapping[str, LoraGroup]
    plan: LoraPlan
    head_plan: LoraPlan

    def add(self, group: str, x: torch.Tensor, out: torch.Tensor) -> None:
        arena = self.arena
        add_lora(out, x, arena.flat, arena.table, self.plan, self.groups[group])

    def add_embedding(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        arena, (target,) = self.arena, self.groups[EMBEDDING].targets
        add_lora_embedding(out, token_ids, arena.flat, arena.table, self.plan, target)

    def add_head(self, x: torch.Tensor, out: torch.Tensor) -> None:
        arena = self.arena
        add_lora(out, x, arena.flat, arena.table, self.head_plan, self.groups[HEAD])


def make_lora_step(
    rows: Sequence[BatchRow], arena: Arena, groups: Mapping[str, LoraGroup]
) -> LoraStep | None:
    """None when no row of the batch has an adapter: then the LoRA path is not entered."""
    if all(row.slot == BASE_SLOT for row in rows):
        return None
    slots = [row.slot for row in rows]
    sampling = [row.slot for row in rows if row.samples]
    plan = LoraPlan.build(slots, [row.num_tokens for row in rows], arena.table, arena.device)
    head_plan = LoraPlan.build(sampling, [1] * len(sampling), arena.table, arena.device)
    return LoraStep(arena, groups, plan, head_plan)
