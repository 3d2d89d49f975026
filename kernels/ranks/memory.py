"""The memory that ranks of one machine share, in which their threads exchange."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
from collections.abc import Sequence

# As in native/src/ranks.cpp.
_MEMBER_BYTES = 128
_SPENT_OFFSET = 64
_SPIN_NS = 200_000
_SHARE_BYTES = 2 * (_MEMBER_BYTES + (64 << 10))


class RankFault(enum.Enum):
    """Why ranks exchange nothing any more."""

    CLOSED = 1
    TIMEOUT = 2
    DISAGREEMENT = 3

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    RankFault.CLOSED: "another rank has ended",
    RankFault.TIMEOUT: "another rank has not taken part in an exchange in time",
    RankFault.DISAGREEMENT: "ranks exchange values of different sizes",
}


class RanksArgs(ctypes.Structure):
    """The memory as operations get it."""

    _fields_ = (
        ("fault", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("num_ranks", ctypes.c_int64),
        ("max_threads", ctypes.c_int64),
        ("timeout_ms", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
    )


def create_file(groups: Sequence[int], num_threads: int) -> int:
    """Returns a new file in memory, through which groups of so many ranks exchange, each rank with
    so many threads at most. It has no name, and is gone when no process has it open. Raises
    OSError."""
    file = os.memfd_create("loadout-ranks")
    try:
        os.ftruncate(file, file_bytes(groups, num_threads))
    except OSError:
        os.close(file)
        raise
    return file


class RankMemory:
    """One rank's view of a group's part of the file that `create_file` has made for the same groups
    and threads. `rank` is its place in the group.

    An exchange fails if another rank does not come for `timeout_s`, and with it those of all
    groups. Threads that wait keep their processors for a while if all have one of their own,
    `spins`. Raises ValueError for a file that was made for others.
    """

    def __init__(
        self,
        file: int,
        groups: Sequence[int],
        group: int,
        rank: int,
        num_threads: int,
        timeout_s: float,
        *,
        spins: bool = False,
    ) -> None:
        num_bytes, found_bytes = file_bytes(groups, num_threads), os.fstat(file).st_size
        if found_bytes != num_bytes:
            found = f"ranks share memory of {found_bytes} bytes, and {max(groups)} ranks of "
            needed = f"{num_threads} threads need {num_bytes}: set --num-threads to the same number"
            raise ValueError(f"{found}{needed} for all")
        self._memory = mmap.mmap(file, num_bytes)
        self._offset = file_bytes(groups[:group], num_threads)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        times = int(timeout_s * 1000), _SPIN_NS * spins
        place = address, address + self._offset
        self.args = RanksArgs(*place, rank, groups[group], num_threads, *times)

    @property
    def fault(self) -> RankFault | None:
        """Why nothing is exchanged any more; None: ranks do."""
        number = struct.unpack_from("I", self._memory)[0]
        return RankFault(number) if number else None

    @property
    def seconds(self) -> float:
        """The time that this rank's first thread has spent in exchanges so far."""
        line = self._offset + _MEMBER_BYTES * self.args.rank * self.args.max_threads
        nanoseconds: int = struct.unpack_from("q", self._memory, line + _SPENT_OFFSET)[0]
        return nanoseconds / 1e9

    def fail(self) -> None:
        """Ends all exchanges, of all groups, because one has ended. Idempotent, from any thread."""
        if self.fault is None:
            struct.pack_into("I", self._memory, 0, RankFault.CLOSED.value)


def file_bytes(groups: Sequence[int], num_threads: int) -> int:
    """Returns the bytes of a line with the fault, and of the lines and shares of these groups."""
    num_members = sum(groups) * num_threads
    return _MEMBER_BYTES * (1 + num_members) + num_members * _SHARE_BYTES
