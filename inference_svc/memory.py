"""What memory this process has: its resident set, and what the machine and its container leave.

Both generations of control groups are understood; without /proc nothing is known.
"""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("proc/meminfo")
CGROUPS = Path("proc/self/cgroup")
MOUNTS = Path("sys/fs/cgroup")
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
    """One for each control group with a limit on memory."""
    try:
        lines = (root / CGROUPS).read_text().splitlines()
    except OSError:
        return []
    found: list[int | None] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / MOUNTS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / MOUNTS / "memory"
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the mount often shows the process's own group as its root.
        parts = [part for part in path.split("/") if part]
        folders = [mount.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
        found += [_group_available(folder, *files) for folder in folders]
    return found


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
