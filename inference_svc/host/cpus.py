"""Which processors this process may keep busy, and how many: those it is bound to, and its groups'
quotas."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from inference_svc.host.cgroups import Group, groups_above


def usable_processors(root: Path = Path("/")) -> int:
    """At least 1. A part of a processor counts as a whole one: what is left of it is idle.

    More threads than a quota pays for run for a part of its period, and then all of them stand
    still until the next.
    """
    quotas = (_quota(group) for group in groups_above(root, "cpu"))
    return max(1, min([_bound_to(), *(quota for quota in quotas if quota is not None)]))


def share_processors(num_threads: int, root: Path = Path("/")) -> list[list[int]]:
    """The processors of this process in one part for each thread, so that no two threads meet on
    one. Empty if there are fewer than threads, or the system does not say which they are.

    A part is a processor where there are just enough, and else some to choose from: those of one
    core first of all, as threads beside each other would share it.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = [_siblings(processor, root) for processor in sorted(os.sched_getaffinity(0))]
    order = sorted((siblings.index(processor), processor) for processor, siblings in cores)
    if len(order) < num_threads:
        return []
    return [[processor for _, processor in order[i::num_threads]] for i in range(num_threads)]


def _siblings(processor: int, root: Path) -> tuple[int, list[int]]:
    """A processor, and those of its core, itself among them."""
    path = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
    siblings = {processor}
    with contextlib.suppress(OSError, ValueError):
        for span in path.read_text().strip().split(","):
            first, _, last = span.partition("-")
            siblings |= set(range(int(first), int(last or first) + 1))
    return processor, sorted(siblings)


def _bound_to() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(group: Group) -> int | None:
    """In processors, rounded up. None: the group sets none."""
    try:
        if group.is_first:
            words = [
                (group.folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            ]
        else:
            words = (group.folder / "cpu.max").read_text().split()
        quota_us, period_us = (int(word) for word in words)
    except (OSError, ValueError):  # also "max", for no quota
        return None
    # The first generation's way to say that there is none is -1.
    return -(-quota_us // period_us) if quota_us > 0 and period_us > 0 else None
