"""Converts pickled weights, if the operator allows them, to safetensors in a sandboxed process.

A pickle is a program. So it is run by torch's restricted reader (weights_only), in a process that
has nothing of ours in its memory; and the resulting file is then checked like any other.

task  reads the pickle and writes safetensors, in that process
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from adapter_store.checkpoint.reading.files import (
    CheckpointLimits,
    check_source_bytes,
    open_file,
)
from adapter_store.core import SourceFile
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import PICKLE_FILE, WEIGHTS_FILE
from servicekit.sandbox.process import Answer, Limits, SandboxFailure, Task, ask_once

TASK = Task(
    Path(__file__).with_name("task.py"),
    Limits(memory_bytes=256 << 20, wall_seconds=300.0, cpu_seconds=120, file_bytes=16 << 20),
    imports_ours=False,
)
"""The memory is in addition to twice the file, and the written bytes in addition to the file's."""
MAX_ANSWER_BYTES = 1 << 16
EXTRA_ENTRIES = 64
"""Archive entries besides the tensors: the pickle, a version, a checksum and the like."""


def convert_pickle(
    folder: Path,
    limits: CheckpointLimits,
    task: Task = TASK,
    check_cancelled: Callable[[], None] = lambda: None,
) -> SourceFile | None:
    """Replaces `adapter_model.bin` in `folder`, if it is there, by durable safetensors.

    Returns the new file, or None if there is nothing to replace. `check_cancelled` is called
    periodically and may raise.

    Raises:
        InvalidAdapter: PICKLE_* or ZIP_* (the content), PICKLE_TIMEOUT, PICKLE_OUT_OF_MEMORY or
            PICKLE_CRASHED (the process did not answer); the subject is the file.
        LimitExceeded: the file is over `limits.max_source_bytes`.
    """
    source = folder / PICKLE_FILE
    if not os.path.lexists(source):
        return None
    with open_file(folder, PICKLE_FILE) as file:
        size_bytes = file.size_bytes
    check_source_bytes(PICKLE_FILE, size_bytes, limits)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unpickle-") as work:
        output = Path(work, WEIGHTS_FILE)
        request = {
            "source": str(source.absolute()),
            "output": str(output.absolute()),
            "max_entries": limits.max_tensors + EXTRA_ENTRIES,
        }
        try:
            answer = ask_once(_sized(task, size_bytes), request, MAX_ANSWER_BYTES, check_cancelled)
        except SandboxFailure as failure:
            detail = f"the process that read it ended: {failure}"
            if failure.is_timeout:
                raise _refused("PICKLE_TIMEOUT", detail) from failure
            raise _refused("PICKLE_CRASHED", detail) from failure
        _check_answer(answer)
        with open_file(output.parent, output.name):
            os.rename(output, folder / WEIGHTS_FILE)
    with open(folder / WEIGHTS_FILE, "rb") as written:
        sha256 = hashlib.file_digest(written, "sha256").hexdigest()
        os.fsync(written.fileno())
        converted_bytes = written.tell()
    source.unlink()
    return SourceFile(WEIGHTS_FILE, converted_bytes, sha256)


def _sized(task: Task, size_bytes: int) -> Task:
    """Returns the task with the limits of reading a file of this size."""
    memory_bytes = task.limits.memory_bytes + 2 * size_bytes
    file_bytes = task.limits.file_bytes + size_bytes
    limits = replace(task.limits, memory_bytes=memory_bytes, file_bytes=file_bytes)
    return replace(task, limits=limits)


def _check_answer(answer: Answer) -> None:
    """Raises InvalidAdapter unless the file is written. The answer is not trusted either."""
    if answer.kind != b"W":
        reason, _, detail = answer.text.partition("\n")
        raise _refused(reason[:64], ascii(detail[:300])[1:-1])


def _refused(reason: str, detail: str) -> InvalidAdapter:
    return InvalidAdapter(f"{PICKLE_FILE}: {detail}", subject=PICKLE_FILE, reason=reason)
