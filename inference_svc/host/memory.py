"""What memory this process has: its resident set, and what the machine and its container leave.

Both generations of control groups are understood; without /proc nothing is known.
"""

from __future__ import annotations

import os
from pathlib import Path

from inference_svc.host.cgroups import groups_above

MEMINFO = Path("proc/meminfo")
V1_UNLIMITED_BYTES = 1 << 62


def resident_bytes() -> int:
    """The resident set of this process; 0 where it cannot be told."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes(root: Path = Path("/")) -> int | None:
    """What may still be allocated: the least that the machine and every control group above this
    process leave. Page cache counts as free, because it gives way. None where nothing is known.
    """
    found = [_machine_available(root / MEMINFO), *_groups_available(root)]
    return min((num_bytes for num_bytes in found if num_bytes is not None), default=None)


def _machine_available(meminfo: Path) -> int | None:
    kibibytes = _numbers(meminfo).get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _groups_available(root: Path) -> list[int | None]:
    """One for each control group that may limit memory."""
    first = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    second = "memory.max", "memory.current", "inactive_file"
    return [
        _group_available(group.folder, *(first if group.is_first else second))
        for group in groups_above(root, "memory")
    ]


def _group_available(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    limit_bytes, used_bytes = _number(folder / limit), _number(folder / usage)
    if limit_bytes is None or used_bytes is None or limit_bytes >= V1_UNLIMITED_BYTES:
        return None
    return max(0, limit_bytes - used_bytes + _numbers(folder / "memory.stat").get(cache, 0))


def _number(path: Path) -> int | None:
    """None also for "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
