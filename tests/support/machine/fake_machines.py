"""Machines of any shape, as the files that a system has of them, and processes on these."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import strategies as st


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_cores(root: Path, cores: Iterable[Iterable[int]]) -> None:
    """Writes the siblings of each processor."""
    for core in cores:
        siblings = ",".join(map(str, sorted(core)))
        for processor in core:
            write_siblings(root, {processor: siblings})


def write_siblings(root: Path, siblings: Mapping[int, str]) -> None:
    """Writes lists of siblings, such as "0-1" or "0,4", by processor."""
    for processor, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        write(folder / "thread_siblings_list", f"{text}\n")


@dataclass(frozen=True)
class FakeMachine:
    """A machine whose `cores` have these processors. A process may use those in `affinity`, and
    `quota_us` of each 100,000 microseconds; 0: without a quota."""

    cores: tuple[tuple[int, ...], ...]
    affinity: frozenset[int]
    quota_us: int

    @property
    def parts(self) -> list[set[int]]:
        """The usable processors of each core that has some."""
        return [part for core in self.cores if (part := {*core} & self.affinity)]

    def within_quota(self, count: int) -> int:
        return min(count, math.ceil(self.quota_us / 100_000)) if self.quota_us else count

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Yields the root of the machine's files, while its affinity is this process's."""
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
            root = Path(name)
            write_cores(root, self.cores)
            if self.quota_us:
                write(root / "proc/self/cgroup", "0::/\n")
                write(root / "sys/fs/cgroup/cpu.max", f"{self.quota_us} 100000\n")
            patch.setattr(os, "sched_getaffinity", lambda process: set(self.affinity))
            yield root


@st.composite
def fake_machines(draw: st.DrawFn) -> FakeMachine:
    """Cores of one to four processors, in any order of numbers."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    numbers = iter(draw(st.permutations(range(sum(sizes)))))
    cores = tuple(tuple(next(numbers) for _ in range(size)) for size in sizes)
    affinity = draw(st.frozensets(st.integers(0, sum(sizes) - 1), min_size=1))
    return FakeMachine(cores, affinity, draw(st.just(0) | st.integers(1_000, 1_200_000)))
