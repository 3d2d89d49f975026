"""LoRA for programs of native operations: built once over the arena, planned anew every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.layout import EMBEDDING
from inference_svc.core import BASE_SLOT, BatchRow, SlotRuns, slot_runs
from kernels.lora import LoraGroup
from kernels.lora.native import NativeLora, NativeLoraPlan
from kernels.native.library import NativeOp

MAX_KNOWN = 16
"""The maximum number of sets of changed groups that are distinguished: each is a program."""


class NativeLoraOps:
    """Operations for steps of up to `max_tokens` tokens and `max_rows` rows; see
    `native.AdapterOps`. There are none for groups that are not in `groups`."""

    def __init__(
        self, arena: Arena, groups: Mapping[str, LoraGroup], max_tokens: int, max_rows: int
    ) -> None:
        self._groups = groups
        self._table = arena.table
        self._plan = NativeLoraPlan(max_tokens, table=arena.table)
        self._sampling_plan = NativeLoraPlan(max_rows, table=arena.table)
        most = max(len(group.targets) for group in groups.values())
        self._lora = NativeLora.create(arena.table, self._plan, most)
        self._sampling_lora = NativeLora.create(arena.table, self._sampling_plan, most)
        self._names = tuple(groups)
        self._every_group = frozenset(groups)
        # Targets of no group, which no adapter here changes, are of one behind all groups.
        self._group_of_target = np.full(arena.table.num_targets, len(groups), np.int64)
        for index, group in enumerate(groups.values()):
            self._group_of_target[list(group.targets)] = index
        self._known: dict[bytes, frozenset[str]] = {}
        self._planned: tuple[SlotRuns, list[int], list[int]] | None = None

    @property
    def workspace_bytes(self) -> int:
        return self._lora.shrunk.nbytes + self._sampling_lora.shrunk.nbytes

    def plan(self, rows: Sequence[BatchRow]) -> frozenset[str]:
        """Plans the step's rows. Returns the groups that any of their adapters changes, or all
        groups if too many other sets have been seen."""
        if all(row.slot == BASE_SLOT for row in rows):
            return frozenset()
        sequences, starts, counts, _ = zip(*rows, strict=True)
        runs = slot_runs(sequences, starts, counts)
        used = set(runs.slots) - {BASE_SLOT}
        if not used:
            return frozenset()
        sizes = [len(self._table.part_slots(slot)) for slot in runs.slots]
        current = runs, sizes, [row.slot for row in rows if row.samples]
        if current != self._planned:  # most steps equal the one before
            self._plan.fill(*runs)
            self._sampling_plan.fill(current[-1])
            self._planned = current
        return self._groups_of(used)

    def _groups_of(self, used: set[int]) -> frozenset[str]:
        rows = [part for slot in used for part in self._table.part_slots(slot)]
        ranks = self._table.b_ranks.numpy()[rows]
        num_groups = len(self._names)
        counts = np.bincount(self._group_of_target, ranks.any(axis=0), num_groups + 1)[:num_groups]
        changed = counts > 0
        key = changed.tobytes()
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                return self._every_group
            self._known[key] = self._names_of(changed)
        return self._known[key]

    def groups_of(self, targets: Collection[int]) -> frozenset[str]:
        """Returns what `plan` would return now for rows of one adapter that has these targets."""
        changed = np.zeros(len(self._names) + 1, np.bool_)
        changed[self._group_of_target[list(targets)]] = True
        changed = changed[:-1]
        if changed.tobytes() not in self._known and len(self._known) >= MAX_KNOWN:
            return self._every_group
        return self._names_of(changed)

    def _names_of(self, changed: np.ndarray) -> frozenset[str]:
        return frozenset(name for name, is_in in zip(self._names, changed, strict=True) if is_in)

    def add(self, group: str, x: Tensor, out: Tensor, *, samples_only: bool) -> list[NativeOp]:
        if group not in self._groups:
            return []
        lora = self._sampling_lora if samples_only else self._lora
        return lora.add_ops(self._groups[group], x, out)

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> list[NativeOp]:
        if EMBEDDING not in self._groups:
            return []
        (target,) = self._groups[EMBEDDING].targets
        return self._lora.add_embedding_ops(target, token_ids, out)
