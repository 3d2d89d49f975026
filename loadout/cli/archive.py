"""An archive of debug info: bounded, for its owner only, and whole or not there."""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadout.cli.output_file import new_file
from loadout.types import DebugPart

MAX_PART_BYTES = 32 << 20
MAX_PARTS = 64
"""Of one service. Ours tell about ten; whoever answers in their place is not trusted."""
_NAME = re.compile(r"[a-z0-9_]{1,40}\.(json|txt)")


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive."""

    path: str
    content: bytes


def member_of(folder: str, part: DebugPart) -> Member:
    """The file of what a service told; without content it says why."""
    if not _NAME.fullmatch(part.name):
        return failure(f"{folder}/part", "a part with a bad name")
    path = f"{folder}/{part.name}"
    if part.error or len(part.content) > MAX_PART_BYTES:
        return failure(path, part.error or f"more than {MAX_PART_BYTES} bytes")
    return Member(path, part.content)


def failure(path: str, why: str) -> Member:
    """Stands where `path` would."""
    return Member(f"{path}.missing.txt", f"{why}\n".encode())


def json_member(path: str, value: Any) -> Member:
    return Member(path, json.dumps(value, indent=1, default=str).encode())


def write(path: Path, folder: str, members: Iterable[Member]) -> int:
    """A tar.gz in which all lies in `folder`. Returns its size in bytes; raises OSError."""
    with new_file(path) as file:
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
            for member in members:
                info = tarfile.TarInfo(f"{folder}/{member.path}")
                info.size, info.mode, info.mtime = len(member.content), 0o600, int(time.time())
                archive.addfile(info, io.BytesIO(member.content))
        return file.tell()
