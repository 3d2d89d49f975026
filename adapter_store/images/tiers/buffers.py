"""Buffers for images, and a pool of spare ones, whose pages need not be faulted in again."""

from __future__ import annotations

import mmap
from collections import deque

import torch

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def allocate_buffer(num_bytes: int) -> torch.Tensor:
    """Returns uint8 [num_bytes], not initialised; pinned where there is CUDA, so that devices can
    copy from it.

    Without CUDA it is a mapping of its own, which goes back to the system as soon as it is freed.
    """
    if num_bytes == 0:  # an empty image
        return torch.empty(0, dtype=torch.uint8)
    if torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=_FLAGS), dtype=torch.uint8)


def resident_buffer(num_bytes: int) -> torch.Tensor:
    """Returns a buffer as `allocate_buffer`, with all its pages faulted in."""
    return allocate_buffer(num_bytes).zero_()


class BufferPool:
    """Spare buffers, the oldest freed first. Used from one thread; its owner accounts for them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.spare_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._spares: deque[torch.Tensor] = deque()

    def has(self, num_bytes: int) -> bool:
        """Returns whether there is a spare buffer of exactly this size."""
        return any(spare.numel() == num_bytes for spare in self._spares)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns a buffer of exactly this size: a spare one, else a new one."""
        for index, spare in enumerate(self._spares):
            if spare.numel() == num_bytes:
                del self._spares[index]
                self.spare_bytes -= num_bytes
                return spare
        return allocate_buffer(num_bytes)

    def put(self, buffer: torch.Tensor) -> None:
        """Adds a buffer that is no longer read or written, if it fits."""
        self._spares.append(buffer)
        self.spare_bytes += buffer.numel()
        self.shrink(self._capacity_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Frees spare buffers until at most `max_bytes` are left."""
        while self.spare_bytes > max(0, max_bytes):
            self.spare_bytes -= self._spares.popleft().numel()


def torch_versions() -> dict[str, str | None]:
    """Returns the versions of torch and of the CUDA that it was built for."""
    return {"version": torch.__version__, "cuda": torch.version.cuda}
