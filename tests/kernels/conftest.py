"""What every kernel test shares: one measure of closeness, and memory that punishes omissions."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.native import build
from kernels.native.library import Library
from tests.support.native import native_library

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "worker.py"
POISONED_PACKAGES = ("kernels.", "inference_svc.")


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An allocator whose memory is NaN when our packages ask, so that an output element that a
    kernel forgets, or a scratch element that it reads unwritten, shows."""

    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if tensor.is_floating_point() and caller.startswith(POISONED_PACKAGES):
            tensor.fill_(float("nan"))
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture(scope="session")
def assert_close():
    """`assert_close(name, ref, got, ratio)`: root mean square of the error over that of `ref`."""

    def check(name: str, ref: torch.Tensor, got: torch.Tensor, ratio: float) -> None:
        assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(ref.shape)}"
        assert got.dtype == ref.dtype, f"{name}: {got.dtype}, not {ref.dtype}"
        assert got.isfinite().all(), f"{name}: {int((~got.isfinite()).sum())} values not finite"
        ref, got = ref.double(), got.double()
        error = float((got - ref).square().mean().sqrt())
        scale = float(ref.square().mean().sqrt())
        assert error <= ratio * scale, f"{name}: relative RMS {error / scale:.1e} > {ratio:.1e}"

    return check


class Worker:
    """A Python process of its own: Triton decides at import whether it interprets or compiles."""

    def __init__(self, operations: Path, interpret: bool) -> None:
        env = {
            **os.environ,
            "TRITON_INTERPRET": "1" if interpret else "0",
            "PYTHONPATH": str(ROOT),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(operations)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a function of the operations there; raises what it raised, as text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((operation, args, kwargs), self._process.stdin)
        self._process.stdin.flush()
        ok, result = pickle.load(self._process.stdout)
        if not ok:
            raise RuntimeError(result)
        return result

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="session")
def start_worker():
    """`start_worker(operations, interpret)`: see worker.py."""
    workers: list[Worker] = []

    def start(operations: Path, *, interpret: bool) -> Worker:
        workers.append(Worker(operations, interpret))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture(scope="module")
def interpreter(request, start_worker):
    """Runs the OPERATIONS beside the test's file in Triton's interpreter."""
    return start_worker(request.path.parent / "operations.py", interpret=True)


@pytest.fixture(scope="module")
def compiler(request, start_worker):
    """Runs the OPERATIONS beside the test's file, which compile without a GPU."""
    return start_worker(request.path.parent / "operations.py", interpret=False)


@pytest.fixture(params=build.FLAGS, scope="module")
def library(request: pytest.FixtureRequest) -> Library:
    """The native kernels of every instruction set that runs here."""
    return native_library(request.param)
