"""What every kernel test shares: one measure of closeness, and memory that punishes omissions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.native import build
from kernels.native.library import Library
from tests.support.kernels.poisoned import poisoned
from tests.support.kernels.worker_process import Operations, Worker
from tests.support.native import native_library


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


@pytest.fixture(scope="session")
def start_worker():
    """`start_worker(operations, interpret)`: see worker.py. All interpreted operations are run by
    one process, and those that compile by one each."""
    workers: list[Worker] = []
    interpreters: list[Worker] = []

    def start(operations: Path, *, interpret: bool) -> Operations:
        if interpret and interpreters:
            return Operations(interpreters[0], operations)
        worker = Worker(interpret=interpret)
        workers.append(worker)
        if interpret:
            interpreters.append(worker)
        return Operations(worker, operations)

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
