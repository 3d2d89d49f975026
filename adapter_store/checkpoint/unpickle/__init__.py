"""Converts pickled weights, if the operator allows them, to safetensors in a child process.

A pickle is a program. So it is run by torch's restricted reader (weights_only), in a process that
has no secrets in its environment and is limited in memory, CPU time, wall-clock time and the size
of its output; and the resulting file is then checked like any other.

__main__  the program of the child process
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapter_store.checkpoint.reading.child_process import ChildFailure, run_child
from adapter_store.checkpoint.reading.files import (
    CheckpointLimits,
    check_source_bytes,
    open_file,
    read_capped,
)
from adapter_store.core import SourceFile
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import PICKLE_FILE, WEIGHTS_FILE

CHILD = Path(__file__).with_name("__main__.py")
MAX_RESULT_BYTES = 1 << 16
EXTRA_ENTRIES = 64
"""Archive entries besides the tensors: the pickle, a version, a checksum and the like."""


@dataclass(frozen=True, slots=True)
class UnpickleLimits:
    """Limits of reading one file; memory is in addition to twice the file."""

    memory_bytes: int = 256 << 20
    cpu_seconds: int = 120
    wall_seconds: float = 300.0


def convert_pickle(
    folder: Path,
    limits: CheckpointLimits,
    unpickle_limits: UnpickleLimits | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> SourceFile | None:
    """Replaces `adapter_model.bin` in `folder`, if it is there, by durable safetensors.

    Returns the new file, or None if there is nothing to replace. `check_cancelled` is called
    periodically and may raise.

    Raises:
        InvalidAdapter: PICKLE_* or ZIP_* (the content), PICKLE_TIMEOUT, PICKLE_OUT_OF_MEMORY or
            PICKLE_CRASHED (the child did not end by itself); the subject is the file.
        LimitExceeded: the file is over `limits.max_source_bytes`.
    """
    source = folder / PICKLE_FILE
    if not os.path.lexists(source):
        return None
    with open_file(folder, PICKLE_FILE) as file:
        size_bytes = file.size_bytes
    check_source_bytes(PICKLE_FILE, size_bytes, limits)
    unpickle_limits = unpickle_limits or UnpickleLimits()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unpickle-") as work:
        output, result = Path(work, WEIGHTS_FILE), Path(work, "result.json")
        numbers = (
            2 * size_bytes + unpickle_limits.memory_bytes,
            unpickle_limits.cpu_seconds,
            limits.max_tensors + EXTRA_ENTRIES,
        )
        command = [sys.executable, "-I", str(CHILD), *map(str, (source, output, result, *numbers))]
        try:
            run_child(command, Path(work), unpickle_limits.wall_seconds, check_cancelled)
        except ChildFailure as failure:
            reason = "PICKLE_TIMEOUT" if failure.is_timeout else "PICKLE_CRASHED"
            raise _refused(reason, f"the process that read it ended: {failure}") from failure
        _read_answer(result)
        with open_file(output.parent, output.name):
            os.rename(output, folder / WEIGHTS_FILE)
    with open(folder / WEIGHTS_FILE, "rb") as written:
        sha256 = hashlib.file_digest(written, "sha256").hexdigest()
        os.fsync(written.fileno())
        converted_bytes = written.tell()
    source.unlink()
    return SourceFile(WEIGHTS_FILE, converted_bytes, sha256)


def _read_answer(result: Path) -> None:
    """Raises InvalidAdapter unless the child succeeded. Its output is not trusted either."""
    try:
        answer = json.loads(read_capped(result.parent, result.name, MAX_RESULT_BYTES))
        reason, detail = str(answer.get("reason", "")), str(answer.get("detail", ""))
    except (ValueError, AttributeError, InvalidAdapter) as exc:
        raise _refused("PICKLE_CRASHED", "the process that read it gave no answer") from exc
    if reason:
        raise _refused(reason[:64], ascii(detail[:300])[1:-1])


def _refused(reason: str, detail: str) -> InvalidAdapter:
    return InvalidAdapter(f"{PICKLE_FILE}: {detail}", subject=PICKLE_FILE, reason=reason)
