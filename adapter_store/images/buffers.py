"""Buffers for images. Some that came free are kept: their pages need not be faulted in again."""

from __future__ import annotations

import mmap
from collections import deque

import torch

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def allocate_buffer(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], not initialised; pinned where CUDA is, so that devices copy from it.

    Without CUDA a mapping of its own: freed, it goes back to the system at once.
    """
    if torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=_FLAGS), dtype=torch.uint8)


def resident_buffer(num_bytes: int) -> torch.Tensor:
    """As `allocate_buffer`, and all of it is there: nobody waits for its pages any more."""
    return allocate_buffer(num_bytes).zero_()


class BufferPool:
    """Spare buffers, the oldest first out. Used from one thread; its owner accounts for them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.spare_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._spares: deque[torch.Tensor] = deque()

    def has(self, num_bytes: int) -> bool:
        """Whether there is a spare buffer of exactly this size."""
        return any(spare.numel() == num_bytes for spare in self._spares)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of exactly this size: a spare one, else a new one."""
        for index, spare in enumerate(self._spares):
            if spare.numel() == num_bytes:
                del self._spares[index]
                self.spare_bytes -= num_bytes
                return spare
        return allocate_buffer(num_bytes)

    def give(self, buffer: torch.Tensor) -> None:
        """Keeps a buffer that nobody reads or writes any more, if it fits."""
        self._spares.append(buffer)
        self.spare_bytes += buffer.numel()
        self.shrink(self._capacity_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Frees spare buffers until at most `max_bytes` are left."""
        while self.spare_bytes > max(0, max_bytes):
            self.spare_bytes -= self._spares.popleft().numel()
