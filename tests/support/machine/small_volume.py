"""A file system of a few MiB, which can really be full.

It is mounted in namespaces of its own, which Linux lets every user make, and vanishes with the
process that holds them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallVolume:
    """A tmpfs at `folder`, seen by processes that `enter` the namespaces of process `pid`. Others
    see its files below `outside`, which SQLite does not take: it follows the link in it."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder, self.pid = folder, pid
        self.outside = Path(f"/proc/{pid}/root{folder}")

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.outside)
        return found.f_bavail * found.f_frsize

    def fill(self, name: str = "filler") -> None:
        """Takes all that is free, as another program's file."""
        with open(self.outside / name, "ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self, name: str = "filler") -> None:
        (self.outside / name).unlink()


@contextmanager
def small_volume(folder: Path, num_bytes: int, options: str = "") -> Iterator[SmallVolume]:
    """A volume of this size at a new folder, mounted with these options besides."""
    folder.mkdir(parents=True)
    options = ",".join(filter(None, (f"size={num_bytes}", options)))
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && echo mounted && exec cat'
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    holder = subprocess.Popen(
        ["unshare", "--mount", *as_root, "sh", "-c", script, "sh", options, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n", "a tmpfs cannot be mounted here"
        yield SmallVolume(folder, holder.pid)
    finally:
        holder.communicate()


def enter(pid: int) -> None:
    """Moves this process, which has one thread, into the namespaces of another."""
    libc = ctypes.CDLL(None, use_errno=True)
    others = [(f"/proc/{pid}/ns/{name}", f"/proc/self/ns/{name}") for name in ("user", "mnt")]
    opened = [os.open(each, os.O_RDONLY) for each, own in others if not os.path.samefile(each, own)]
    for fd in opened:
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
