"""Starts the worker, and calls it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class Worker:
    """A Python process of its own: Triton decides at import whether it interprets or compiles."""

    def __init__(self, *, interpret: bool) -> None:
        env = {
            **os.environ,
            "TRITON_INTERPRET": "1" if interpret else "0",
            # The interpreter multiplies with numpy. OpenBLAS has kernels for newer processors in
            # which the sum of a row depends on the rows beside it: a GPU has nothing like that.
            "OPENBLAS_CORETYPE": "Nehalem",
            "PYTHONPATH": str(ROOT),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kernels.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )

    def call(self, operations: Path, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a function of the operations there; raises what it raised, as text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((operations, operation, args, kwargs), self._process.stdin)
        self._process.stdin.flush()
        ok, result = pickle.load(self._process.stdout)
        if not ok:
            raise RuntimeError(result)
        return result

    def close(self) -> None:
        self._process.communicate(timeout=30)


class Operations:
    """The operations of a file, run by a worker, which others may share."""

    def __init__(self, worker: Worker, file: Path) -> None:
        self._worker = worker
        self._file = file

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._worker.call(self._file, operation, *args, **kwargs)
