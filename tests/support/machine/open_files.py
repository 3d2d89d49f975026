"""The files that a process has open."""

from __future__ import annotations

import contextlib
import os


def open_files(pid: int | None = None) -> list[str]:
    """Returns the name of each descriptor's file; without a `pid`, of this process."""
    folder, found = f"/proc/{pid or os.getpid()}/fd", []
    for each in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # as of this listing itself
            found.append(os.readlink(f"{folder}/{each}"))
    return found
