"""Where the control groups above this process lie, in both of their generations."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("proc/self/cgroup")
MOUNTS = Path("sys/fs/cgroup")


class Group(NamedTuple):
    """A folder that may be there. `is_first` tells which generation's files it holds."""

    folder: Path
    is_first: bool


def groups_above(root: Path, controller: str) -> list[Group]:
    """Those that may limit what `controller` controls, such as "memory"; none without /proc."""
    try:
        lines = (root / CGROUPS).read_text().splitlines()
    except OSError:
        return []
    found: list[Group] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_first = controllers != ""
        if is_first and controller not in controllers.split(","):
            continue
        mount = root / MOUNTS / controller if is_first else root / MOUNTS
        # In a container the mount often shows the process's own group as its root.
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts) + 1):
            found.append(Group(mount.joinpath(*parts[:count]), is_first))
    return found
