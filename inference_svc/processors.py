"""How many processors this process may keep busy: those it is bound to, and its groups' quotas."""

from __future__ import annotations

import os
from pathlib import Path

from inference_svc.cgroups import Group, groups_above


def usable_processors(root: Path = Path("/")) -> int:
    """At least 1. A part of a processor counts as a whole one: what is left of it is idle.

    More threads than a quota pays for run for a part of its period, and then all of them stand
    still until the next.
    """
    quotas = (_quota(group) for group in groups_above(root, "cpu"))
    return max(1, min([_bound_to(), *(quota for quota in quotas if quota is not None)]))


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
