"""Large memory of the host, whole from the start: a page that is first touched in a step would cost
that step a fault, and a start that succeeds must not run out of memory later."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20

_LINE_BYTES = 64
_LONG_ROW_BYTES = 1024


def allocate_host(num_bytes: int) -> Tensor:
    """Zeroed, resident bytes: uint8 `[num_bytes]` on 64 bytes; large ones on a page, in huge pages
    where the system gives them to who asks (a tenth faster to read). Freed with the last view."""
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    return _map(num_bytes).zero_()


def allocate_pinned(num_bytes: int) -> Tensor:
    """Allocates host memory from which a CUDA device copies while it computes.

    torch's own allocator of pinned memory rounds up to a power of 2, from 80 GiB to 128.

    Args:
        num_bytes: Size in bytes.

    Returns:
        uint8 [num_bytes], zeroed.

    Raises:
        OSError: The system refuses to pin so much.
    """
    # A child that is forked shares no page of it, or the device would keep the old ones.
    memory = _map(num_bytes, _PinnedMemory, mmap.MADV_DONTFORK).zero_()
    status = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if status:
        message = f"{num_bytes} bytes of host memory cannot be pinned: CUDA error {status}"
        raise OSError(errno.ENOMEM, message)
    return memory


_FOR_ALL_CONTEXTS, _READ_ONLY = 1, 8
"""CUDA's cudaHostRegisterPortable and cudaHostRegisterReadOnly."""


class HostRegistrar:
    """Registers read-only memory of others with a CUDA device, which then copies from it while it
    computes. Thread-safe; both calls take a while, in which other threads run. `on_device` makes
    the device the current one of a thread, or the call would begin to use the first."""

    def __init__(self, on_device: Callable[[], AbstractContextManager[object]]) -> None:
        self._on_device = on_device

    def register(self, data: memoryview) -> None:
        """Registers these bytes, which must stay where they are until `unregister`. Raises OSError
        if the device refuses them."""
        # CUDA keeps the error of a call for the thread that has made it: do not call this in a
        # thread that launches kernels, which would find it there.
        with self._on_device():
            flags = _FOR_ALL_CONTEXTS | _READ_ONLY
            status = int(_cuda_runtime().cudaHostRegister(_address(data), len(data), flags))
        if status:
            message = f"{len(data)} bytes of shared memory cannot be registered"
            raise OSError(errno.ENOMEM, f"{message}: CUDA error {status}")

    def unregister(self, data: memoryview) -> None:
        """Ends it, once no copy is under way. Raises OSError."""
        with self._on_device():
            status = int(_cuda_runtime().cudaHostUnregister(_address(data)))
        if status:
            raise OSError(errno.EINVAL, f"CUDA error {status}")


def view_of(data: memoryview) -> Tensor:
    """Returns bytes as uint8 [num_bytes], to be read only, and as long as they are there: unlike
    torch's own view, it is one of memory that cannot be written to, and does not keep it."""
    return torch.frombuffer(
        (ctypes.c_uint8 * len(data)).from_address(_address(data)), dtype=torch.uint8
    )


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


class _PinnedMemory(mmap.mmap):
    """Lets CUDA know before the memory goes back to the system."""

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends: so does the registration
            _cuda_runtime().cudaHostUnregister(torch.frombuffer(self, dtype=torch.uint8).data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


def _map(num_bytes: int, kind: type[mmap.mmap] = mmap.mmap, *advice: int) -> Tensor:
    """Zeroed bytes that are there once they are touched."""
    memory = kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for each in advice:
        memory.madvise(each)
    with contextlib.suppress(AttributeError, OSError):  # another system, or one without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Slab:
    """Memory in pieces that lie side by side in few large allocations, so that nearly all of it is
    in huge pages. It is freed with the last view of a piece."""

    CHUNK_BYTES = 256 << 20
    """The last huge page of each allocation is resident as a whole, used or not; the rest of an
    allocation that no piece fits in is not."""
    ALIGNMENT_BYTES = 64

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Zeroed, resident uint8 `[num_bytes]` on 64 bytes."""
        whole_bytes = -(-num_bytes // self.ALIGNMENT_BYTES) * self.ALIGNMENT_BYTES
        if whole_bytes > len(self._chunk):
            chunk_bytes = max(whole_bytes, self.CHUNK_BYTES)
            memory = _map(chunk_bytes + HUGE_PAGE_BYTES)
            start = -memory.data_ptr() % HUGE_PAGE_BYTES
            self._chunk = memory[start : start + chunk_bytes]
        piece, self._chunk = self._chunk[:num_bytes], self._chunk[whole_bytes:]
        return piece.zero_()


def row_stride(width: int, item_bytes: int) -> int:
    """Returns the elements from one row to the next of a matrix whose rows are `width` elements and
    may be apart.

    Long rows are an odd number of cache lines apart. Rows a power of two apart would compete for a
    few places of the first cache, and products read and write many of them at once.
    """
    row_bytes = width * item_bytes
    if row_bytes < _LONG_ROW_BYTES:
        return width
    return (-(-row_bytes // _LINE_BYTES) | 1) * _LINE_BYTES // item_bytes
