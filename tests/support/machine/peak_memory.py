"""How far the memory of a running process rises."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def grown_mib(pid: int) -> Iterator[list[float]]:
    """Yields a list that gets how far the peak rose above what was resident before, in MiB, once
    the context ends."""
    grown: list[float] = []
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
    before_kib = _status_kib(pid, "VmRSS")
    yield grown
    grown.append((_status_kib(pid, "VmHWM") - before_kib) / 1024)


def resident_mib(pid: int) -> float:
    """Returns what of a running process is in memory."""
    return _status_kib(pid, "VmRSS") / 1024


class _HeapStatistics(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_mib() -> float:
    """Returns the memory that this process has allocated in the C heap and not freed. Unlike its
    resident set, holes that earlier allocations have left do not change it."""
    statistics = ctypes.CDLL(None).mallinfo2
    statistics.restype = _HeapStatistics
    found = statistics()
    return (found.uordblks + found.hblkhd) / 2**20


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(name)
