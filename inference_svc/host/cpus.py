"""The processors that this process may use: its affinity, the cores that they belong to, and its
control groups' quotas.

A processor is one that the operating system schedules threads on. Processors of one core, its
hyperthreads, are siblings.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from inference_svc.host.memory import ControlGroup, control_groups

CPU_INFO = Path("proc/cpuinfo")
_MODEL_KEYS = ("model name", "Model", "cpu model")


class Processor(NamedTuple):
    """The machine's processor, as far as this process's affinity allows. `quota` is the time that
    its control groups allow, in processors, such as 2.5; 0: there is no quota."""

    name: str
    num_cores: int
    num_processors: int
    quota: float = 0.0

    def __str__(self) -> str:
        counts = counted(self.num_cores, "core"), counted(self.num_processors, "processor")
        is_limited = 0 < self.quota < self.num_processors
        quota = (f"quota {self.quota:g}",) if is_limited else ()
        return f"{self.name}: {', '.join(counts + quota)}"


def find_processor(root: Path = Path("/")) -> Processor:
    """Returns the processor. Must be called before threads are bound to processors: their affinity
    is a part of the process's."""
    num_processors = _affinity_size()
    num_cores = len(_cores(root)) or num_processors
    return Processor(cpu_name(root), num_cores, num_processors, _tightest_quota(root) or 0.0)


def cpu_name(root: Path = Path("/")) -> str:
    """Returns the processor's name in /proc/cpuinfo."""
    try:
        lines = (root / CPU_INFO).read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in facts.items()}
    return next((named[key] for key in _MODEL_KEYS if named.get(key)), "unknown processor")


def compute_threads(wanted: int = 0, num_ranks: int = 1, root: Path = Path("/")) -> int:
    """Returns how many threads compute on each of `num_ranks` processes, at least 1: `wanted`, or,
    if that is 0, an equal part of the usable cores.

    A core has one set of units for products, and one tile unit with AMX. Its siblings would share
    them, and each operation would wait for the slower one. A small core of a machine with two kinds
    is a core, too: threads take work as they finish it, so that a slower one takes less.
    """
    return wanted or max(1, usable_cores(root) // num_ranks)


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns how many processors this process may keep busy, at least 1; a part counts as one.

    More threads than a quota allows run for a part of its period, and then all of them are stopped
    until the next.
    """
    return _within_quotas(_affinity_size(), root)


def usable_cores(root: Path = Path("/")) -> int:
    """Returns how many cores this process may keep busy, at least 1: siblings count once. Without
    the system's topology each processor counts as a core."""
    return _within_quotas(len(_cores(root)) or _affinity_size(), root)


def _within_quotas(count: int, root: Path) -> int:
    quota = _tightest_quota(root)
    return max(1, count if quota is None else min(count, math.ceil(quota)))


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal shares of a machine's cores, such as a rank's."""

    index: int = 0
    count: int = 1


WHOLE = Share()


def partition_cpus(
    num_threads: int, share: Share = WHOLE, root: Path = Path("/")
) -> list[list[int]]:
    """Returns this process's processors in disjoint parts, one for each thread; empty if there are
    fewer than threads, or their numbers are unknown.

    They are of a share of the cores, which is of one NUMA node where nodes divide into shares. If
    there are enough cores, a part has whole cores, so that no two threads share one. Else each
    core has a thread, then second siblings have one as far as there are threads, and siblings that
    are left are in the part of their core's first thread.
    """
    cores = _cores_of(share, root)
    if num_threads <= len(cores):
        parts = [cores[i::num_threads] for i in range(num_threads)]
        return [sorted(processor for core in part for processor in core) for part in parts]
    places = sorted((core.index(processor), processor) for core in cores for processor in core)
    if len(places) < num_threads:
        return []
    of_thread = {processor: [processor] for _, processor in places[:num_threads]}
    for first, *siblings in cores:
        of_thread[first] += [each for each in siblings if each not in of_thread]
    return list(of_thread.values())


@contextmanager
def bound_to(share: Share, root: Path = Path("/")) -> Iterator[None]:
    """Keeps the calling thread, and the threads that it starts, on a share of the cores within the
    context: the memory that they first touch is near. Nothing happens where no share has a core, or
    there is one."""
    processors = {each for core in _cores_of(share, root) for each in core}
    if share.count == 1 or not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a sandbox may forbid it: slower, not wrong
        os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def unbind() -> None:
    """Lets the calling thread, and what it starts, run on all processors of this process: it may
    come from a thread that has been placed on a few."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _affinity())


def _cores_of(share: Share, root: Path) -> list[list[int]]:
    """Returns the processors of a share's cores, by core; none if some share would have none."""
    cores = sorted(_cores(root), key=lambda core: _node(core[0], root))
    if len(cores) < share.count:
        return []
    first, end = (len(cores) * each // share.count for each in (share.index, share.index + 1))
    return cores[first:end]


def _node(processor: int, root: Path) -> int:
    """Returns the NUMA node of a processor; 0 if it is unknown."""
    folder = root / f"sys/devices/system/cpu/cpu{processor}"
    found = (path.name.removeprefix("node") for path in folder.glob("node*"))
    return next((int(name) for name in found if name.isdigit()), 0)


def _cores(root: Path) -> list[list[int]]:
    """Returns the processors of this process's affinity by core, ascending; empty if their numbers
    are unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores: dict[int, list[int]] = {}
    for processor in sorted(_affinity()):
        cores.setdefault(min(_siblings(processor, root)), []).append(processor)
    return list(cores.values())


def _siblings(processor: int, root: Path) -> set[int]:
    """Returns a processor and all others of its core that are online, usable or not."""
    path = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
    siblings = {processor}
    with contextlib.suppress(OSError, ValueError):
        for span in path.read_text().strip().split(","):
            first, _, last = span.partition("-")
            siblings |= set(range(int(first), int(last or first) + 1))
    return siblings


def _tightest_quota(root: Path) -> float | None:
    quotas = (_quota(group) for group in control_groups(root, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _affinity_size() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(_affinity())
    return os.cpu_count() or 1


def _affinity() -> set[int]:
    """Returns the processors that any thread of this process may run on: the calling one may have
    been placed on a few, for an engine before this one."""
    found = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                found |= os.sched_getaffinity(int(thread))
    return found


def _quota(group: ControlGroup) -> float | None:
    """Returns a group's quota in processors; None if it sets none."""
    try:
        if group.is_v1:
            words = [
                (group.folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            ]
        else:
            words = (group.folder / "cpu.max").read_text().split()
        quota_us, period_us = (int(word) for word in words)
    except (OSError, ValueError):  # also "max", for no quota
        return None
    # Version 1 has -1 where there is none.
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def counted(count: int, noun: str) -> str:
    """Returns a number of things, such as "2 cores"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
