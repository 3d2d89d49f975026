"""The memory that a service alone has."""

from __future__ import annotations

from pathlib import Path

from tests.support import forks


def own_bytes(pid: int) -> int:
    """Returns the bytes that a process and its children do not share.

    These are anonymous pages that it has written, and its shared memory. Files that it maps do not
    count, because the machine's other processes may map them too. Nor do the pages that a fork
    shares with the process that forked it: the kernel divides each (`Pss`) by the number of forks
    that run, so that it would grow when a fork of another test ends.
    """
    folder = Path(f"/proc/{pid}")
    own_kib = _written_kib((folder / "smaps").read_text())
    for line in (folder / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            own_kib += int(line.split()[1])
    children = (folder / "task" / str(pid) / "children").read_text().split()
    children += [str(each) for each in forks.engines_of(pid)]
    return own_kib * 1024 + sum(own_bytes(int(each)) for each in children)


def _written_kib(smaps: str) -> int:
    """Returns the private, anonymous pages of all mappings that are private."""
    total = dirty = 0
    is_private = False
    for line in smaps.splitlines():
        key, first, *_ = line.split()
        if not key.endswith(":"):  # "7f12-7f34 rw-p ...": a mapping begins
            is_private = first.endswith("p")
        elif key == "Private_Dirty:":
            dirty = int(first)
        elif key == "Anonymous:" and is_private:
            total += min(dirty, int(first))
    return total
