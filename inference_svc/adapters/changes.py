"""What residency decides about the arena, as plain data that rides in a batch."""

from __future__ import annotations

from dataclasses import dataclass

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
