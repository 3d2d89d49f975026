"""The plan: which tokens of one step use which slot, and where targets are mixtures, which expert.

Built once per step from host data and read by every layer. The host part (segments, targets that
occur) serves the CPU, and lets the engine skip targets that no adapter of the batch has. The
kernels read only the device part (token slots, work items).

For a mixture of experts, the tokens are pairs of a token and one of its experts, sorted so that
pairs with the same slot and expert are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import tuning

from .rows import NO_EXPERT
from .table import LoraTable

IntArray = NDArray[np.int64]

BASE_SLOT = -1
ROWS_TOKENS = 16
"""Most rows of one token (decode) in an item: they share one read of A and B. A product of the
tensor cores has as many rows."""
TILE_TOKENS = 64
"""Most tokens of longer rows (prefill) in an item."""

ITEM_NOTHING, ITEM_ROWS, ITEM_TILE = 0, 1, 2
"""Kinds of work items. Zero is nothing, so that a zeroed list is an empty one."""


class PlannedItems(NamedTuple):
    """`LoraPlan.items` and `LoraPlan.order` of a step's rows, int32 [num_items, 4 or 5] and
    [num_tokens]."""

    items: NDArray[np.int32]
    order: NDArray[np.int32]


class LoraSegment(NamedTuple):
    """Tokens [start, end) of the step, all of one slot and expert."""

    start: int
    end: int
    slot: int
    expert: int = NO_EXPERT


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Targets that read the same input and are computed together.

    Target `targets[k]` adds to columns [out_offsets[k], out_offsets[k] + out_features[k]).
    """

    targets: tuple[int, ...]
    in_features: int
    out_offsets: tuple[int, ...]
    out_features: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.targets, "a group has targets"
        assert len(self.targets) == len(self.out_offsets) == len(self.out_features)

    @property
    def out_end(self) -> int:
        """Columns an output needs at least."""
        return max(o + n for o, n in zip(self.out_offsets, self.out_features, strict=True))

    def most_rows_beside(self, item_bytes: int) -> int:
        """Returns up to how many rows a recorded step computes the group beside the base, by the
        device's constants. 0: never.

        Above 0 the kernels round products to the outputs' dtype before they add them, in steps of
        any size: a row's bits depend neither on the place nor on the number of rows.
        """
        sizes = {"in_features": self.in_features, "out_features": self.out_end}
        return tuning.constants("beside", itemsize=item_bytes, **sizes)["most_rows"]


class LoraContents(NamedTuple):
    """The union of a step's adapters; see LoraPlan."""

    targets: frozenset[int]
    weights: frozenset[int] = frozenset()
    has_vectors: bool = False
    has_rows: bool = False
    has_mixes: bool = False

    @classmethod
    def of(cls, table: LoraTable, slots: Iterable[int]) -> LoraContents:
        """Returns the union of the adapters and mixes in these slots of `table`."""
        used = {slot for slot in slots if slot != BASE_SLOT}
        adapters = [table.adapters[part] for slot in used for part in table.part_slots(slot)]
        return cls(
            frozenset[int]().union(*(adapter.target_set for adapter in adapters)),
            frozenset[int]().union(*(adapter.weight_set for adapter in adapters)),
            any(adapter.has_vectors for adapter in adapters),
            any(adapter.has_rows for adapter in adapters),
            any(map(table.is_mix, used)),
        )

    @classmethod
    def everything(cls, table: LoraTable) -> LoraContents:
        """Returns the union of all that adapters and their sums can have."""
        return cls(
            frozenset(range(table.num_targets)),
            frozenset(range(table.num_weights)),
            has_vectors=True,
            has_rows=True,
            has_mixes=table.num_mixes > 0,
        )


@dataclass(frozen=True, eq=False, slots=True)
class LoraPlan:
    """One step's tokens by slot.

    `segments` cover exactly the tokens that use an adapter, in order. `targets` are the targets of
    any adapter of the batch. Rows of one token are always in items of their own kind, whatever runs
    beside them. A token's numbers do not depend on the other tokens of its item, so they do not
    depend on the batch.
    """

    num_tokens: int
    segments: tuple[LoraSegment, ...]
    targets: frozenset[int]
    max_rank: int
    has_tiles: bool
    num_rows: int
    """Rows of one token with an adapter, at most."""
    has_vectors: bool
    """Whether any of the targets has vectors over its outputs; see `table.OutputVectors`."""
    weights: frozenset[int]
    """The weights of the base that any adapter of the batch replaces."""
    has_rows: bool
    """Whether it is single rows for any of them."""
    has_mixes: bool
    """Whether any slot is a mix's."""
    token_slots: torch.Tensor
    """int32 [num_tokens]: slot of each token, -1 = base."""
    items: torch.Tensor
    """int32 [num_items, 4]: start, number of tokens, slot and kind of each program's tokens, which
    are up to ROWS_TOKENS rows of one token, or up to TILE_TOKENS tokens of longer rows. After the
    last: zeros. Where tokens have experts [num_items, 5]: and their expert."""
    order: torch.Tensor | None = None
    """int32 [num_tokens]: the tokens, sorted by slot, rows of one token before longer ones. Items
    are runs of it. None: the tokens are sorted already."""
    token_experts: torch.Tensor | None = None
    """int32 [num_tokens]: expert of each token among those held here; of base tokens any. None:
    this is no plan of a mixture."""

    @property
    def has_experts(self) -> bool:
        return self.token_experts is not None

    @property
    def has_adapters(self) -> bool:
        return bool(self.targets)

    def has_group(self, group: LoraGroup) -> bool:
        """Whether any adapter of the batch changes any target of `group`."""
        return not self.targets.isdisjoint(group.targets)

    @classmethod
    def build(
        cls,
        row_slots: Sequence[int],
        row_lengths: Sequence[int],
        table: LoraTable,
        device: torch.device | str,
        row_experts: Sequence[int] | None = None,
    ) -> LoraPlan:
        """The plan of rows in batch order: row i has `row_lengths[i]` tokens of `row_slots[i]`, and
        for targets that are mixtures of `row_experts[i]`.

        Slots are -1 (base), rows of `table` as it is now, or first rows of its mixes.
        """
        segments = tuple(plan_segments(row_slots, row_lengths, row_experts))
        items, order = plan_items(
            np.asarray(row_slots, np.int64),
            np.asarray(row_lengths, np.int64),
            None if row_experts is None else np.asarray(row_experts, np.int64),
        )
        used = {segment.slot for segment in segments}
        ranks = (table.adapters[part].max_rank for slot in used for part in table.part_slots(slot))
        slots = _per_token(row_slots, row_lengths)
        experts = [] if row_experts is None else _per_token(row_experts, row_lengths)
        num_tokens = len(slots)
        # One list, one copy to the device.
        flat = items.flatten().tolist() + order.tolist()
        packed = _to_device(flat + slots + experts, device)
        return cls(
            num_tokens=num_tokens,
            segments=segments,
            **LoraContents.of(table, used)._asdict(),
            max_rank=max(ranks, default=0),
            has_tiles=bool((items[:, 3] == ITEM_TILE).any()),
            num_rows=int(items[items[:, 3] == ITEM_ROWS, 1].sum()),
            token_slots=packed[len(flat) : len(flat) + num_tokens],
            items=packed[: items.size].view(-1, items.shape[1]),
            order=packed[items.size : len(flat)],
            token_experts=None if row_experts is None else packed[len(flat) + num_tokens :],
        )


def plan_segments(
    slots: Sequence[int], lengths: Sequence[int], experts: Sequence[int] | None = None
) -> Iterator[LoraSegment]:
    """`LoraPlan.segments` of rows."""
    if experts is None:
        experts = [NO_EXPERT] * len(slots)
    start = 0
    for key, rows in groupby(zip(slots, experts, lengths, strict=True), key=lambda row: row[:2]):
        end = start + sum(length for *_, length in rows)
        if key[0] != BASE_SLOT and end > start:
            yield LoraSegment(start, end, *key)
        start = end


def plan_items(
    row_slots: IntArray, row_lengths: IntArray, row_experts: IntArray | None = None
) -> PlannedItems:
    """Sorts rows by expert, slot and kind, and cuts runs of equal ones into items.

    Args:
        row_slots: [num_rows], as in `LoraPlan.build`.
        row_lengths: [num_rows].
        row_experts: [num_rows]. None: the rows have no experts.
    """
    keys = 2 * row_slots + (row_lengths > 1)
    if row_experts is None:
        by = np.argsort(keys, kind="stable")
    else:
        by = np.lexsort((keys, row_experts))
    keys, lengths = keys[by], row_lengths[by]
    begins_run = np.ones(len(keys), dtype=np.bool_)
    begins_run[1:] = keys[1:] != keys[:-1]
    if row_experts is not None:
        begins_run[1:] |= np.diff(row_experts[by]) != 0
    ends = np.cumsum(lengths)
    firsts = np.flatnonzero(begins_run)
    run_starts = (ends - lengths)[firsts]
    run_ends = np.append(run_starts[1:], ends[-1:])
    run_slots, run_is_long = keys[firsts] >> 1, keys[firsts] & 1
    steps = np.where(run_is_long, TILE_TOKENS, ROWS_TOKENS)
    counts = np.where(run_slots == BASE_SLOT, 0, -((run_starts - run_ends) // steps))
    run = np.repeat(np.arange(len(firsts)), counts)
    items = np.empty((len(run), 4 if row_experts is None else 5), dtype=np.int32)
    items[:, 0] = (
        run_starts[run] + (np.arange(len(run)) - (np.cumsum(counts) - counts)[run]) * (steps[run])
    )
    items[:, 1] = np.minimum(steps[run], run_ends[run] - items[:, 0])
    items[:, 2] = run_slots[run]
    items[:, 3] = np.where(run_is_long, ITEM_TILE, ITEM_ROWS)[run]
    if row_experts is not None:
        items[:, 4] = row_experts[by][firsts][run]
    # Where in the step each row begins, less where it begins in the order.
    moved = (np.cumsum(row_lengths) - row_lengths)[by] - (ends - lengths)
    order = np.repeat(moved, lengths) + np.arange(len(row_lengths) and ends[-1])
    return PlannedItems(items, order.astype(np.int32))


def plan_decodes(row_slots: IntArray) -> PlannedItems:
    """Does the same as `plan_items`, for rows of one token each, in fewer operations."""
    order = np.argsort(row_slots, kind="stable")
    slots = row_slots[order]
    first = int(np.searchsorted(slots, BASE_SLOT, side="right"))
    slots = slots[first:]
    begins_run = np.ones(len(slots), dtype=np.bool_)
    begins_run[1:] = slots[1:] != slots[:-1]
    places = np.arange(len(slots))
    in_run = places - np.maximum.accumulate(np.where(begins_run, places, 0))
    starts = np.flatnonzero(in_run % ROWS_TOKENS == 0)
    items = np.empty((len(starts), 4), dtype=np.int32)
    items[:, 0] = starts + first
    items[:, 1] = np.diff(starts, append=len(slots))
    items[:, 2] = slots[starts]
    items[:, 3] = ITEM_ROWS
    return PlannedItems(items, order.astype(np.int32))


def _per_token(of_rows: Sequence[int], row_lengths: Sequence[int]) -> list[int]:
    return [each for each, n in zip(of_rows, row_lengths, strict=True) for _ in range(n)]


def _to_device(values: list[int], device: torch.device | str) -> torch.Tensor:
    host = torch.tensor(values, dtype=torch.int32)
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
