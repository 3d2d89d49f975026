"""Memory that processes share: files without names, whose sizes are sealed.

Else a process could cut a file, and others would die of a read. The system frees the memory with
the last process that has it open or mapped, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import resource
import stat
import tempfile
from collections.abc import Callable
from typing import Any, Self
from weakref import WeakValueDictionary

_SIZE_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0x2) | getattr(fcntl, "F_SEAL_GROW", 0x4)
_NO_MORE_SEALS = getattr(fcntl, "F_SEAL_SEAL", 0x1)
_NO_WRITES = 0x10
"""F_SEAL_FUTURE_WRITE, which Python 3.11 has no name for. F_SEAL_WRITE might wait for a processor
that has just written a page."""

_PART_BYTES = 1 << 20
_numbers = itertools.count()

Mapped = WeakValueDictionary[int, memoryview]
"""The mappings of the bytes that one other process has made, by their numbers, as long as they are
used."""


class SharedMemory:
    """Memory of a fixed size, which this process reads, and a process that it starts may write at
    any time: copy a part before you use it twice."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """`name` is shown to operators. Raises OSError if the machine has no memory or files."""
        self.num_bytes = num_bytes
        self.file = -1
        self.file = _make_file(name, num_bytes)
        _add_seals(self.file, _SIZE_SEALS | _NO_MORE_SEALS)
        self.view = _mapped(self.file, num_bytes)
        """The memory, read-only. It stays mapped as long as a part of it is used."""

    def clear(self) -> None:
        """Makes all of it zeros, as it was at first, and gives it back to the machine. Raises
        OSError if the machine has no files for it."""
        with mmap.mmap(self.file, self.num_bytes) as memory:
            if hasattr(mmap, "MADV_REMOVE"):
                memory.madvise(mmap.MADV_REMOVE)
            else:
                memory[:] = bytes(self.num_bytes)

    def close(self) -> None:
        """Closes the file: no more processes get it. Idempotent."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


class SharedBytes:
    """Bytes that nobody can change any more, for processes that trust each other. They are let go
    of with the last reference.

    It pickles without its bytes: whoever loads it is given the `file`, too, and calls `receive`.
    `number` is of no other bytes of the process that has made them.
    """

    def __init__(self, num_bytes: int, number: int) -> None:
        self.num_bytes = num_bytes
        self.number = number
        self.file = -1
        """Given to others by the process that has made it; -1 in these."""
        self.sha256 = b""
        """The hash of the bytes, in that process."""
        self._view: memoryview | None = None

    @classmethod
    def of(cls, name: str, data: bytes | memoryview) -> Self:
        """Copies bytes, at least one. `name` is shown to operators. Raises OSError if the machine
        has no memory or files."""
        made = cls(len(data), next(_numbers))
        made.file = _make_file(name, len(data))
        digest, start = hashlib.sha256(), 0
        while start < len(data):
            # Of memory that others may write the hash is of these bytes, too.
            part = bytes(data[start : start + _PART_BYTES])
            count = os.write(made.file, part)
            digest.update(part[:count])
            start += count
        made.sha256 = digest.digest()
        with contextlib.suppress(OSError):  # Linux before 5.1
            _add_seals(made.file, _NO_WRITES)
        _add_seals(made.file, _SIZE_SEALS | _NO_MORE_SEALS)
        return made

    @property
    def is_here(self) -> bool:
        """Whether this process has the bytes."""
        return self.file >= 0 or self._view is not None

    @property
    def view(self) -> memoryview:
        """The bytes, mapped from the first use on: a mapping has a descriptor of its own."""
        if self._view is None:
            assert self.file >= 0, "its file was not received"
            self._view = _mapped(self.file, self.num_bytes)
        return self._view

    def receive(self, file: int, mapped: Mapped) -> None:
        """Maps a file that another process has given, unless it is `mapped` already, and closes it.
        Raises OSError if the machine has no room for it, or it is another file."""
        try:
            self._view = mapped.get(self.number)
            if self._view is not None:
                return
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self.num_bytes:
                raise OSError(f"a file of {found.st_size} bytes in place of {self.num_bytes}")
            self._view = mapped[self.number] = _mapped(file, self.num_bytes)
        finally:
            os.close(file)

    def __reduce__(self) -> tuple[Callable[[int, int], Any], tuple[int, int]]:
        return SharedBytes, (self.num_bytes, self.number)

    def __del__(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


def descriptors_for(most: int) -> int:
    """Returns how many descriptors one purpose may have, of up to `most`: a quarter of those that
    this process may open, so that others find some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 4)


def _mapped(file: int, num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(file, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))


def _make_file(name: str, num_bytes: int) -> int:
    """Returns a file of memory; of the disk where there is no such memory."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as found:
            found.truncate(num_bytes)
            return os.dup(found.fileno())
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_bytes)
    except BaseException:
        os.close(file)
        raise
    return file


def _add_seals(file: int, seals: int) -> None:
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(file, getattr(fcntl, "F_ADD_SEALS", 1033), seals)
