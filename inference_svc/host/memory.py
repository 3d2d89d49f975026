"""This process's memory: its resident set, and the free memory of the machine and its control
groups.

Both versions of control groups are supported; without /proc nothing is known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("proc/self/cgroup")
CGROUP_MOUNTS = Path("sys/fs/cgroup")
MEMINFO = Path("proc/meminfo")
V1_UNLIMITED_BYTES = 1 << 62


class ControlGroup(NamedTuple):
    """A control group's folder, which may not exist; `is_v1`: it holds the files of version 1."""

    folder: Path
    is_v1: bool


def control_groups(root: Path, controller: str) -> list[ControlGroup]:
    """Returns the groups above this process that may limit the resource of `controller`, such as
    "memory"; none without /proc."""
    try:
        lines = (root / CGROUPS).read_text().splitlines()
    except OSError:
        return []
    found: list[ControlGroup] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v1 = controllers != ""
        if is_v1 and controller not in controllers.split(","):
            continue
        mount = root / CGROUP_MOUNTS / controller if is_v1 else root / CGROUP_MOUNTS
        # In a container the mount often shows the process's own group as its root.
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts) + 1):
            found.append(ControlGroup(mount.joinpath(*parts[:count]), is_v1))
    return found


def resident_bytes(process_id: int | None = None) -> int:
    """Returns the resident set of a process, of this one by default; 0 where it is unknown."""
    try:
        pages = int(Path(f"/proc/{process_id or 'self'}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory that may still be allocated: the least that the machine and every control
    group above this process leave; None where nothing is known. Page cache counts as free: it is
    reclaimed.
    """
    found = [_machine_available(root / MEMINFO), *_groups_available(root)]
    return min((num_bytes for num_bytes in found if num_bytes is not None), default=None)


def _machine_available(meminfo: Path) -> int | None:
    kibibytes = _numbers(meminfo).get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _groups_available(root: Path) -> list[int | None]:
    """Returns the free memory of each control group that may limit it."""
    v1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    v2 = "memory.max", "memory.current", "inactive_file"
    return [
        _group_available(group.folder, *(v1 if group.is_v1 else v2))
        for group in control_groups(root, "memory")
    ]


def _group_available(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    limit_bytes, used_bytes = _number(folder / limit), _number(folder / usage)
    if limit_bytes is None or used_bytes is None or limit_bytes >= V1_UNLIMITED_BYTES:
        return None
    return max(0, limit_bytes - used_bytes + _numbers(folder / "memory.stat").get(cache, 0))


def _number(path: Path) -> int | None:
    """Returns the number that a file holds; None if there is none, or "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Reads lines of a name and a number."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
