"""The adapter store as a process of its own that starts at once.

Importing it takes seconds: one process imports, and every store that is started is a fork of it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["adapter_store.app"])


def start(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Runs the command's own main, with its output at the end of `log`. Its environment is this
    process's as it is now, with further variables."""
    variables = {**os.environ, **(environment or {})}
    process = _context.Process(target=_run, args=(list(arguments), log, variables), daemon=True)
    process.start()
    return process


def _run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    from adapter_store.__main__ import main

    status = main(arguments)
    logging.shutdown()  # a fork ends without the functions that run at an interpreter's exit
    sys.exit(status)
