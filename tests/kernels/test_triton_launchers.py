"""On a machine without a compiler, Triton finds all that launching our kernels needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
OPERATIONS = Path(__file__).parent / "triton_launches.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What an image has: the folder, filled where there is a compiler."""
    folder = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kernels.triton_launchers"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" modules compiled\n")
    return folder


@pytest.fixture(scope="module")
def worker(cache, start_worker):
    """A process that has the cache, and no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setenv("PATH", "")
        patch.delenv("CC", raising=False)
        return start_worker(OPERATIONS, interpret=False)


def test_every_launch_has_its_module(worker):
    assert worker.call("missing_modules") == []
    assert worker.call("has_driver_module")


def test_every_kernel_is_launched(worker):
    """What the test above looks at is all there is."""
    launched = worker.call("num_launches_by_kernel")
    assert {name.rpartition(".")[2] for name in launched} == worker.call("every_kernel")


def test_an_empty_cache_has_none(start_worker, monkeypatch, tmp_path):
    """The check can fail."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    worker = start_worker(OPERATIONS, interpret=False)
    assert worker.call("missing_modules")
    assert not worker.call("has_driver_module")
