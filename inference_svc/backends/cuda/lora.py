"""LoRA plans at fixed addresses on the device, refilled every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.cuda.inputs import ALIGNMENT_BYTES, StepBlock
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.lora_step import LoraStep
from inference_svc.backends.slot_runs import SlotRuns, last_slots, slot_runs
from inference_svc.core import BASE_SLOT, BatchColumns
from inference_svc.model.sharding.exchange import Exchange
from kernels.lora import LoraPlan
from kernels.lora.plan import (
    ITEM_ROWS,
    ITEM_TILE,
    TILE_TOKENS,
    IntArray,
    LoraContents,
    PlannedItems,
    plan_decodes,
    plan_items,
    plan_segments,
)


class CudaLora:
    """LoRA plans for steps of up to `max_tokens` tokens of up to `max_rows` rows, in `block`.
    `exchange`: of a model that is cut."""

    def __init__(
        self,
        arena: Arena,
        targets: AppliedTargets,
        block: StepBlock,
        max_tokens: int,
        max_rows: int,
        exchange: Exchange | None = None,
    ) -> None:
        self.arena = arena
        self._targets = targets
        self._exchange = exchange
        self._tokens = _PlanArrays(block, max_tokens, max_rows)
        self._heads = _PlanArrays(block, max_rows, max_rows)
        self._slots: list[int] = []
        self.more_elsewhere: set[int] = set()
        """The slots of adapters with more than A and B in another stage."""
        self._is_decode = False
        self._contents = {
            StepKind.LORA: LoraContents(frozenset(range(arena.table.num_targets))),
            StepKind.ANY: LoraContents.everything(arena.table),
        }

    @staticmethod
    def num_bytes(max_tokens: int, max_rows: int) -> int:
        """Returns its bytes in the block."""
        return _PlanArrays.num_bytes(max_tokens, max_rows) + _PlanArrays.num_bytes(
            max_rows, max_rows
        )

    def fill(self, batch: BatchColumns) -> StepKind:
        """Plans the step's rows on the host; returns the kind of their adapters."""
        sequences, starts, counts, is_decode = batch
        slots = [sequence.slot for sequence in sequences]
        if is_decode or max(slots) == BASE_SLOT:
            return self.fill_runs(SlotRuns(slots, [1] * len(slots)), slots, is_decode=is_decode)
        runs, heads = slot_runs(sequences, starts, counts), last_slots(sequences, starts, counts)
        return self.fill_runs(runs, heads, is_decode=False)

    def fill_runs(self, runs: SlotRuns, heads: Sequence[int], *, is_decode: bool) -> StepKind:
        """Does the same for runs of tokens, of decode rows one each. `heads` are the slots of the
        last tokens of rows."""
        self._is_decode, self._slots = is_decode, runs.slots
        if max(runs.slots) == BASE_SLOT:
            return StepKind.BASE
        if is_decode:
            self._tokens.fill_decodes(np.array(runs.slots, dtype=np.int64))
        else:
            self._tokens.fill(*(np.array(of_run, dtype=np.int64) for of_run in runs))
            self._heads.fill_decodes(np.array(heads, dtype=np.int64))
        used = {*self._slots} - {BASE_SLOT}
        return StepKind.ANY if any(map(self._has_more, used)) else StepKind.LORA

    def clear(self) -> None:
        """Plans a step without adapters: what an earlier step has left would be computed."""
        self._slots = []
        for arrays in (self._tokens, self._heads):
            arrays.clear()

    def _has_more(self, slot: int) -> bool:
        """Whether it is a sum, or an adapter with more than A and B."""
        table = self.arena.table
        adapter = table.adapters[slot]
        has_more = adapter.has_vectors or bool(adapter.replaced) or slot in self.more_elsewhere
        return table.is_mix(slot) or has_more

    def step(self) -> LoraStep:
        """Returns the plans that were filled."""
        contents = LoraContents.of(self.arena.table, self._slots)
        heads = self._tokens if self._is_decode else self._heads
        plan, head_plan = (arrays.plan(self.arena, contents) for arrays in (self._tokens, heads))
        return self._made(plan, head_plan)

    def padded_step(self, shape: StepShape, *, is_recorded: bool = True) -> LoraStep | None:
        """Returns plans for a recorded step of this shape, for any adapters. Without
        `is_recorded`, they launch kernels as steps do that are computed kernel by kernel: nothing
        runs on the second stream."""
        kind, num_tokens, num_rows, has_prompts = shape
        if kind is StepKind.BASE:
            return None
        plan = self._any_plan(self._tokens, kind, num_tokens, num_rows, has_tiles=has_prompts)
        heads = plan
        if has_prompts:
            heads = self._any_plan(self._heads, kind, num_rows, num_rows, has_tiles=False)
        return self._made(plan, heads, may_be_beside=is_recorded and kind is StepKind.LORA)

    def any_step(self, kind: StepKind, num_tokens: int, num_rows: int, has_tiles: bool) -> LoraStep:
        """Returns plans of a step with prompts whose adapters are any, with tiles or without: they
        launch every kernel that such a step may need."""
        plan = self._any_plan(self._tokens, kind, num_tokens, num_rows, has_tiles)
        heads = self._any_plan(self._heads, kind, num_rows, num_rows, has_tiles=False)
        return self._made(plan, heads)

    def _made(self, plan: LoraPlan, heads: LoraPlan, *, may_be_beside: bool = False) -> LoraStep:
        return LoraStep(self.arena, self._targets, plan, heads, may_be_beside, self._exchange)

    def _any_plan(
        self, arrays: _PlanArrays, kind: StepKind, num_tokens: int, num_rows: int, has_tiles: bool
    ) -> LoraPlan:
        contents = self._contents[kind]
        return arrays.any_plan(self.arena, contents, num_tokens, num_rows, has_tiles)


class _PlanArrays:
    """One plan's device part; see `LoraPlan`."""

    def __init__(self, block: StepBlock, max_tokens: int, max_rows: int) -> None:
        slots = block.zeros(max_tokens, dtype=torch.int32)
        items = block.zeros(_max_items(max_tokens, max_rows), 4, dtype=torch.int32)
        order = block.zeros(max_tokens, dtype=torch.int32)
        slots.fill_(BASE_SLOT)
        torch.arange(max_tokens, out=order)
        self._slots, self._items, self._order = slots.numpy(), items.numpy(), order.numpy()
        self._device_slots = block.on_device(slots)
        self._device_items = block.on_device(items)
        self._device_order = block.on_device(order)
        self._num_tokens = self._num_items = self._num_rows = 0
        self._has_tiles = False
        self._rows: tuple[IntArray, IntArray] = _NO_ROWS

    @staticmethod
    def num_bytes(max_tokens: int, max_rows: int) -> int:
        return 8 * max_tokens + 16 * _max_items(max_tokens, max_rows) + 3 * ALIGNMENT_BYTES

    def fill(self, row_slots: IntArray, row_lengths: IntArray) -> None:
        """Fills the rest, after the step's own tokens and items, with base rows and empty items."""
        planned = plan_items(row_slots, row_lengths)
        self._fill(np.repeat(row_slots, row_lengths), planned)
        kinds, counts = planned.items[:, 3], planned.items[:, 1]
        self._has_tiles = bool((kinds == ITEM_TILE).any())
        self._num_rows = int(counts[kinds == ITEM_ROWS].sum())
        self._rows = row_slots, row_lengths

    def fill_decodes(self, row_slots: IntArray) -> None:
        """Fills as `fill`, for rows of one token each, in fewer operations."""
        self._fill(row_slots, plan_decodes(row_slots))
        self._has_tiles = False
        self._num_rows = len(row_slots)
        self._rows = row_slots, np.ones_like(row_slots)

    def clear(self) -> None:
        """Fills in no tokens."""
        self.fill_decodes(np.zeros(0, dtype=np.int64))

    def _fill(self, slots: IntArray, planned: PlannedItems) -> None:
        """Fills the tokens' slots and the items, and clears the rest of the step before."""
        num_tokens, num_items = len(slots), len(planned.items)
        self._slots[:num_tokens] = slots
        self._slots[num_tokens : self._num_tokens] = BASE_SLOT
        self._order[:num_tokens] = planned.order
        self._order[num_tokens : self._num_tokens] = range(num_tokens, self._num_tokens)
        self._items[:num_items] = planned.items
        self._items[num_items : self._num_items] = 0
        self._num_tokens, self._num_items = num_tokens, num_items

    def plan(self, arena: Arena, contents: LoraContents) -> LoraPlan:
        sizes = self._num_tokens, self._num_items, self._num_rows
        return self._plan(arena, contents, *sizes, self._has_tiles)

    def any_plan(
        self,
        arena: Arena,
        contents: LoraContents,
        num_tokens: int,
        num_rows: int,
        has_tiles: bool,
    ) -> LoraPlan:
        """Has as many items as rows of any adapters and kinds can have, with any contents."""
        num_items = min(_max_items(num_tokens, num_rows), len(self._items))
        return self._plan(arena, contents, num_tokens, num_items, num_rows, has_tiles)

    def _plan(
        self,
        arena: Arena,
        contents: LoraContents,
        num_tokens: int,
        num_items: int,
        num_rows: int,
        tiles: bool,
    ) -> LoraPlan:
        slots, lengths = self._rows if arena.device.type == "cpu" else _NO_ROWS
        return LoraPlan(
            num_tokens=num_tokens,
            segments=tuple(plan_segments(slots.tolist(), lengths.tolist())),
            **contents._asdict(),
            max_rank=arena.table.max_rank,
            has_tiles=tiles,
            num_rows=num_rows,
            token_slots=self._device_slots[:num_tokens],
            items=self._device_items[:num_items],
            order=self._device_order[:num_tokens],
        )


_NO_ROWS = np.zeros(0, np.int64), np.zeros(0, np.int64)
"""Segments are for CPUs alone."""


def _max_items(max_tokens: int, max_rows: int) -> int:
    return min(max_tokens, max_tokens // TILE_TOKENS + 2 * max_rows)
