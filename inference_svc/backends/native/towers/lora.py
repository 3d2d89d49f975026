"""Adapters in the programs of a tower: all rows of a part have the same one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.native.adapter_ops import GroupedOp
from inference_svc.backends.native.lora import NativeLoraOps
from inference_svc.core import BASE_SLOT
from inference_svc.model.operations import Rows
from kernels.lora.native import NativeLora, NativeLoraPlan
from kernels.replaced.native import replace_logits_op


class TowerLoraOps(NativeLoraOps):
    """Operations for parts of up to `max_tokens` tokens, whose cells are `merge` x `merge` of them.
    Adapters may replace whole weights, too."""

    def __init__(self, arena: Arena, targets: AppliedTargets, max_tokens: int, merge: int) -> None:
        super().__init__(arena, targets, max_tokens, max_tokens)
        plan = NativeLoraPlan(max_tokens // merge**2, table=arena.table)
        most = max((len(group.targets) for group in targets.groups.values()), default=1)
        self._of_rows[Rows.CELLS] = NativeLora.create(arena.table, plan, most)
        self._names_of_targets = [each.name for each in arena.layout.targets]
        self._part: tuple[int, int, dict[Rows, int]] | None = None

    def plan_part(self, slot: int, counts: dict[Rows, int]) -> frozenset[str]:
        """Plans a part with so many rows of each kind, of the adapter at this slot. Returns the
        groups that it changes; see `plan`."""
        if slot == BASE_SLOT:
            return frozenset()
        current = slot, len(self._table.part_slots(slot)), counts
        if current != self._part:
            self._part = None  # a half filled plan is none
            for rows, count in counts.items():
                self._of_rows[rows].plan.fill([slot], [count])
            self._part = current
        return self._groups_of({slot})

    def add(
        self, group: str, x: Tensor, out: Tensor, bias: Tensor | None, rows: Rows
    ) -> Iterator[GroupedOp]:
        found = self._groups.get(group)
        if found is None:
            return
        plan = self._of_rows[rows].plan
        for target, start, size in zip(
            found.targets, found.out_offsets, found.out_features, strict=True
        ):
            name = self._names_of_targets[target]
            index = self._targets.weights.get(name)
            if index is None:
                continue
            own, own_bias = out[:, start : start + size], None
            if bias is not None:
                own_bias = bias[start : start + size]
            yield name, replace_logits_op(x, own, self._table, plan, index, size, own_bias)
        yield from super().add(group, x, out, bias, rows)
