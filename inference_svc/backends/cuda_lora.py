"""LoRA plans at fixed addresses on the device, refilled every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from inference_svc.adapters.arena import Arena
from inference_svc.backends.cuda_inputs import ALIGNMENT_BYTES, StepBlock
from inference_svc.backends.torch import LoraStep
from inference_svc.core import BASE_SLOT, BatchRow
from kernels.lora import LoraGroup, LoraPlan, LoraSegment
from kernels.lora.plan import ITEM_TILE, TILE_TOKENS, IntArray, plan_items, plan_segments


class CudaLora:
    """LoRA plans for steps of up to `max_tokens` tokens of up to `max_rows` rows, in `block`."""

    def __init__(
        self,
        arena: Arena,
        groups: Mapping[str, LoraGroup],
        block: StepBlock,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.arena = arena
        self._groups = groups
        self._tokens = _PlanArrays(block, max_tokens, max_rows)
        self._heads = _PlanArrays(block, max_rows, max_rows)
        self._targets: frozenset[int] = frozenset()

    @staticmethod
    def num_bytes(max_tokens: int, max_rows: int) -> int:
        """Returns what it takes of the block."""
        return _PlanArrays.num_bytes(max_tokens, max_rows) + _PlanArrays.num_bytes(
            max_rows, max_rows
        )

    def fill(self, rows: Sequence[BatchRow]) -> bool:
        """Plans the step's rows on the host; False when none of them has an adapter."""
        slots = [row.slot for row in rows]
        used = set(slots) - {BASE_SLOT}
        if not used:
            return False
        adapters = self.arena.table.adapters
        self._targets = frozenset().union(*{adapters[slot].target_set for slot in used})
        lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)
        self._tokens.fill(np.array(slots, dtype=np.int64), lengths)
        sampling = np.array([row.slot for row in rows if row.samples], dtype=np.int64)
        self._heads.fill(sampling, np.ones(len(sampling), dtype=np.int64))
        return True

    def step(self) -> LoraStep:
        """Returns the plans that were filled."""
        plans = (arrays.plan(self.arena, self._targets) for arrays in (self._tokens, self._heads))
        return LoraStep(self.arena, self._groups, *plans)

    def decode_step(self, num_rows: int) -> LoraStep:
        """Returns plans for a recorded step of so many decode rows, whatever adapters they use."""
        # Every row is one token that samples.
        plan = self._tokens.any_plan(self.arena, num_rows, has_tiles=False)
        return LoraStep(self.arena, self._groups, plan, plan)

    def warm_up_step(self, num_tokens: int, has_tiles: bool) -> LoraStep:
        """Launches every kernel that a step with prompts needs, its adapters with tiles or without,
        over what was filled: for base rows, nothing. One row samples."""
        plan = self._tokens.any_plan(self.arena, num_tokens, has_tiles)
        heads = self._heads.any_plan(self.arena, 1, has_tiles=False)
        return LoraStep(self.arena, self._groups, plan, heads)


class _PlanArrays:
    """One plan's device part; see `LoraPlan`."""

    def __init__(self, block: StepBlock, max_tokens: int, max_rows: int) -> None:
        self._slots = block.zeros(max_tokens, dtype=torch.int32)
        self._items = block.zeros(_max_items(max_tokens, max_rows), 4, dtype=torch.int32)
        self._slots.fill_(BASE_SLOT)
        self._device_slots = block.on_device(self._slots)
        self._device_items = block.on_device(self._items)
        self._num_tokens = self._num_items = 0
        self._has_tiles = False
        self._segments: tuple[LoraSegment, ...] = ()

    @staticmethod
    def num_bytes(max_tokens: int, max_rows: int) -> int:
        return 4 * max_tokens + 16 * _max_items(max_tokens, max_rows) + 2 * ALIGNMENT_BYTES

    def fill(self, row_slots: IntArray, row_lengths: IntArray) -> None:
        """Fills the rest, after the step's own tokens and items, with base rows and empty items."""
        slots, items = self._slots.numpy(), self._items.numpy()
        of_tokens = np.repeat(row_slots, row_lengths)
        found = plan_items(row_slots, row_lengths)
        self._num_tokens, self._num_items = len(of_tokens), len(found)
        slots[: len(of_tokens)] = of_tokens
        slots[len(of_tokens) :] = BASE_SLOT
        items[: len(found)] = found
        items[len(found) :] = 0
        self._has_tiles = bool((found[:, 3] == ITEM_TILE).any())
        self._segments = tuple(plan_segments(row_slots.tolist(), row_lengths.tolist()))

    def plan(self, arena: Arena, targets: frozenset[int]) -> LoraPlan:
        return self._plan(arena, targets, self._num_tokens, self._num_items, self._has_tiles)

    def any_plan(self, arena: Arena, num_tokens: int, has_tiles: bool) -> LoraPlan:
        """Claims every target, and an item for each token as far as there are items."""
        every = frozenset(range(arena.table.num_targets))
        num_items = min(num_tokens, len(self._items))
        return self._plan(arena, every, num_tokens, num_items, has_tiles)

    def _plan(
        self, arena: Arena, targets: frozenset[int], num_tokens: int, num_items: int, tiles: bool
    ) -> LoraPlan:
        return LoraPlan(
            num_tokens=num_tokens,
            segments=self._segments,
            targets=targets,
            max_rank=arena.table.max_rank,
            has_tiles=tiles,
            token_slots=self._device_slots[:num_tokens],
            items=self._device_items[:num_items],
        )


def _max_items(max_tokens: int, max_rows: int) -> int:
    return min(max_tokens, max_tokens // TILE_TOKENS + 2 * max_rows)
