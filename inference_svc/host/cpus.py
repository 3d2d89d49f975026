"""The processors that this process may use: its affinity, and its control groups' quotas."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from inference_svc.host.memory import ControlGroup, control_groups


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns how many processors this process may keep busy, at least 1; a part counts as one.

    More threads than a quota allows run for a part of its period, and then all of them are stopped
    until the next.
    """
    return _within_quotas(_affinity_size(), root)


def usable_cores(root: Path = Path("/")) -> int:
    """Returns how many cores this process may keep busy, at least 1: processors that are siblings
    count once."""
    if not hasattr(os, "sched_getaffinity"):
        return usable_cpus(root)
    cores = {tuple(_siblings(each, root)[1]) for each in os.sched_getaffinity(0)}
    return _within_quotas(len(cores), root)


def _within_quotas(count: int, root: Path) -> int:
    quotas = (_quota(group) for group in control_groups(root, "cpu"))
    return max(1, min([count, *(quota for quota in quotas if quota is not None)]))


def partition_cpus(num_threads: int, root: Path = Path("/")) -> list[list[int]]:
    """Returns this process's processors in disjoint parts, one for each thread; empty if there are
    fewer than threads, or their numbers are unknown.

    A part is one processor where there are just enough, else several: siblings of one core are
    put in one part first, as threads of different parts would share the core.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = [_siblings(processor, root) for processor in sorted(os.sched_getaffinity(0))]
    order = sorted((siblings.index(processor), processor) for processor, siblings in cores)
    if len(order) < num_threads:
        return []
    return [[processor for _, processor in order[i::num_threads]] for i in range(num_threads)]


def _siblings(processor: int, root: Path) -> tuple[int, list[int]]:
    """Returns a processor and all others of its core, ascending."""
    path = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
    siblings = {processor}
    with contextlib.suppress(OSError, ValueError):
        for span in path.read_text().strip().split(","):
            first, _, last = span.partition("-")
            siblings |= set(range(int(first), int(last or first) + 1))
    return processor, sorted(siblings)


def _affinity_size() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(group: ControlGroup) -> int | None:
    """Returns a group's quota in processors, rounded up; None if it sets none."""
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
    return -(-quota_us // period_us) if quota_us > 0 and period_us > 0 else None
