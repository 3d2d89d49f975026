"""Memory that a lane's process writes masks to, and the engine reads.

The engine copies a mask before it uses it twice, since the process is not trusted: it can write at
any time.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, NamedTuple

from servicekit.shared_memory import SharedMemory

LINE_BYTES = 64
"""Masks begin on cache lines of their own."""


class MaskPlaces(NamedTuple):
    """Where masks lie in a memory of `num_masks`, each of `mask_bytes`."""

    num_masks: int
    mask_bytes: int

    @property
    def stride(self) -> int:
        return -(-self.mask_bytes // LINE_BYTES) * LINE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.num_masks * self.stride


class MaskMemory(SharedMemory):
    """The engine's side. The system has pages for the masks that were written."""

    def __init__(self, places: MaskPlaces) -> None:
        """Raises OSError if the machine has no memory or files for it."""
        super().__init__("loadout-masks", places.num_bytes)
        self.places = places

    def mask(self, slot: int) -> memoryview:
        """Returns the mask of a slot, which stays mapped as long as it is used."""
        start = slot * self.places.stride
        return self.view[start : start + self.places.mask_bytes]


class WrittenMasks:
    """The side of the process that computes masks."""

    def __init__(self, file: int, places: MaskPlaces) -> None:
        """`file`: the number of the memory's file, which this process has inherited."""
        self._stride, self._mask_bytes = places.stride, places.mask_bytes
        self._mapping = mmap.mmap(file, places.num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def write(self, matcher: Any, slot: int) -> None:
        """Has a matcher write the tokens that may come next."""
        matcher.unsafe_compute_mask_ptr(self._address + slot * self._stride, self._mask_bytes)

    def pop_bit(self, slot: int, token: int) -> bool:
        """Returns whether a mask allows a token, and takes it out."""
        place, bit = slot * self._stride + (token >> 3), 1 << (token & 7)
        byte = self._mapping[place]
        if byte & bit:
            self._mapping[place] = byte & ~bit
        return bool(byte & bit)
