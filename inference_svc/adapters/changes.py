"""What residency decides about the arena, as plain data that rides in a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.adapters.slots import Resident


@dataclass(frozen=True, slots=True)
class TableWrite:
    """Makes an image visible to kernels in its row; its bytes are already in the arena."""

    resident: Resident


@dataclass(frozen=True, slots=True)
class TableClear:
    """Takes a row away from kernels."""

    slot: int


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Starts to copy an image from the host tier into the arena; a TableWrite follows when it lies
    there."""

    host: Resident
    resident: Resident


ResidencyChange = TableWrite | TableClear | HostCopy


@dataclass
class PendingChanges:
    """What was decided and rides in no batch yet, in order."""

    _changes: list[ResidencyChange] = field(default_factory=list)

    def append(self, change: ResidencyChange) -> None:
        self._changes.append(change)

    def take(self, max_copied_bytes: int | None) -> tuple[ResidencyChange, ...]:
        """All but the copies that exceed `max_copied_bytes`: the first of them is taken whatever
        its size, and those left out come first the next time. What overtakes them is about other
        images: nothing may happen to one that is being copied."""
        taken: list[ResidencyChange] = []
        left: list[ResidencyChange] = []
        num_bytes = 0
        for change in self._changes:
            if isinstance(change, HostCopy) and max_copied_bytes is not None:
                after = num_bytes + change.host.num_bytes
                if left or (num_bytes and after > max_copied_bytes):
                    left.append(change)
                    continue
                num_bytes = after
            taken.append(change)
        self._changes = left
        return tuple(taken)
