"""How far the resident memory of a running process rises."""

from __future__ import annotations

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


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(name)
