"""Makes files and folders survive a power cut, one step at a time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries durable: all creations, renames and removals in it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Creates a folder with its parents, durably, unless it exists."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def move_folder(source: Path, target: Path) -> bool:
    """Renames a folder whose files are durable, atomically and durably. Returns False if `target`
    exists."""
    sync_folder(source)
    try:
        os.rename(source, target)
    except OSError:
        if target.is_dir():
            return False
        raise
    sync_folder(target.parent)
    return True


def remove_folder(folder: Path, trash: Path) -> None:
    """Removes a folder, which may be absent, without ever exposing it half-empty.

    `trash` is a path in the same filesystem; leftovers of a crash there can be removed any time.
    """
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return
    sync_folder(folder.parent)
    shutil.rmtree(trash, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a small file: readers see the old content or the new, never part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
