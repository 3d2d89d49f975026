"""Buffers for images, and a pool of spare ones, whose pages need not be faulted in again."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import sys
import weakref
from collections import deque
from contextlib import suppress

import torch

from adapter_store.images.tiers.memory_lock import MemoryLock
from contract.images.sharing import ADD_SEALS, SEAL_SEAL, SEALS
from servicekit.shared_memory import descriptors_for

logger = logging.getLogger(__name__)

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MIN_FILE_BYTES = 256 << 10
"""Smaller images have no file of their own: they are streamed in a millisecond."""
MAX_FILES = 4096
"""How many images have files at most; with the descriptors that their mappings have, these are
never more than half of the files that the process may open."""


class NotSealed(Exception):
    """The image's file cannot be handed out now, for a reason of `contract.images.sharing`."""


class Buffer:
    """The memory of one image: `data`, uint8 [num_bytes], not initialised at first. With a `file`
    it is a mapping of that."""

    def __init__(self, data: torch.Tensor, lock: MemoryLock, file: int | None = None) -> None:
        self.data = data
        self._lock = lock
        self._file = file
        self._is_final = self._is_private = self._is_sealed = False
        self.close_file = weakref.finalize(self, _close, file)

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    @property
    def is_final(self) -> bool:
        """Whether it is not to be written to any more, for a later image either."""
        return self._is_final

    @property
    def is_sealed(self) -> bool:
        """Whether `sealed_file` has returned before, and returns at once."""
        return self._is_sealed

    def set_final(self) -> None:
        """Its image is complete and is to be shared. Raises NotSealed if it has no file."""
        if self._file is None:
            raise NotSealed("small" if self.num_bytes < MIN_FILE_BYTES else "no_file")
        self._is_final = True

    def sealed_file(self) -> int:
        """Returns the descriptor of the file, whose bytes nobody can change any more, and which
        lives as long as the buffer, which is final. Raises NotSealed: as long as others use the
        memory as it was before, it could be written to. A mapping takes a file more, which the
        process may not have now."""
        assert self._is_final
        assert self._file is not None
        if self._is_sealed:
            return self._file
        try:
            if not self._is_private:
                self._make_private(self._file)
            fcntl.fcntl(self._file, ADD_SEALS, SEALS | SEAL_SEAL)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise NotSealed("in_use") from None
            logger.warning("an image cannot be shared now: %s", error)
            raise NotSealed("no_file") from error
        self._is_sealed = True
        return self._file

    def _make_private(self, file: int) -> None:
        """Has the memory mapped so that the file cannot be written through it. Raises OSError."""
        mapped = mmap.mmap(file, self.num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._is_private = True
        self._lock.unlock(self.data)
        self.data = _tensor(mapped)
        self._lock.lock(self.data)


class BufferPool:
    """Makes buffers and keeps spare ones, the oldest freed first. Used from one thread, but for
    `make`; its owner accounts for them. With `has_files` buffers can be shared with other
    processes; else they are pinned where there is CUDA, so that devices can copy from them."""

    def __init__(
        self, capacity_bytes: int, lock: MemoryLock | None = None, *, has_files: bool = False
    ) -> None:
        self.spare_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._lock = MemoryLock("off") if lock is None else lock
        self._max_files = _max_files() if has_files else 0
        self._files: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._spares: deque[Buffer] = deque()

    def has(self, num_bytes: int) -> bool:
        """Returns whether there is a spare buffer of exactly this size."""
        return any(spare.num_bytes == num_bytes for spare in self._spares)

    def take(self, num_bytes: int) -> Buffer:
        """Returns a buffer of exactly this size: a spare one, else a new one."""
        for index, spare in enumerate(self._spares):
            if spare.num_bytes == num_bytes:
                del self._spares[index]
                self.spare_bytes -= num_bytes
                return spare
        return self.make(num_bytes)

    def make(self, num_bytes: int) -> Buffer:
        """Returns a new buffer. Thread-safe."""
        buffer = None
        if num_bytes >= MIN_FILE_BYTES and len(self._files) < self._max_files:
            with suppress(OSError):  # no more files
                buffer = _file_buffer(num_bytes, self._lock)
                self._files.add(buffer)
        if buffer is None:
            buffer = Buffer(allocate_buffer(num_bytes), self._lock)
        self._lock.lock(buffer.data)
        return buffer

    def put(self, buffer: Buffer) -> None:
        """Adds a buffer that is no longer read or written, if it fits; frees a final one."""
        if not buffer.is_final:
            self._spares.append(buffer)
            self.spare_bytes += buffer.num_bytes
            self.shrink(self._capacity_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Frees spare buffers until at most `max_bytes` are left."""
        while self.spare_bytes > max(0, max_bytes):
            self.spare_bytes -= self._spares.popleft().num_bytes


def allocate_buffer(num_bytes: int) -> torch.Tensor:
    """Returns uint8 [num_bytes], not initialised; pinned where there is CUDA.

    Without CUDA it is a mapping of its own, which goes back to the system as soon as it is freed.
    """
    if num_bytes == 0:  # an empty image
        return torch.empty(0, dtype=torch.uint8)
    if torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return _tensor(mmap.mmap(-1, num_bytes, flags=_FLAGS))


def resident_buffer(pool: BufferPool, num_bytes: int) -> Buffer:
    """Returns a new buffer of the pool, with all its pages faulted in. Thread-safe."""
    buffer = pool.make(num_bytes)
    buffer.data.zero_()
    return buffer


def _file_buffer(num_bytes: int, lock: MemoryLock) -> Buffer:
    file = os.memfd_create("loadout-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_bytes)
        return Buffer(_tensor(mmap.mmap(file, num_bytes, mmap.MAP_SHARED)), lock, file)
    except BaseException:
        os.close(file)
        raise


def _tensor(mapping: mmap.mmap) -> torch.Tensor:
    with suppress(OSError, AttributeError):  # the system has no huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _max_files() -> int:
    return descriptors_for(MAX_FILES) if sys.platform == "linux" else 0


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


def torch_versions() -> dict[str, str | None]:
    """Returns the versions of torch and of the CUDA that it was built for."""
    return {"version": torch.__version__, "cuda": torch.version.cuda}
