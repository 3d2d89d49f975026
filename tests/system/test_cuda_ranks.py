"""Ranks on emulated devices, a process each, against transformers and PEFT: torch computes in the
place of Triton, gloo exchanges in the place of NCCL, and recorded steps are computed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.gpu.emulated_ranks import emulated_ranks
from tests.system.kinds import UNSHARED, compare, make_kinds

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SIZES = {"max_sequences": 8, "max_batch_tokens": 64, "prefix_cache": True}


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    with emulated_ranks():
        yield


def test_all_kinds(tmp_path: Path, start: Callable) -> None:
    running = compare(make_kinds("qwen3", tmp_path), start, tensor_parallel=2, **SIZES)
    backend = running.engine.built.engine.runner.backend
    assert backend.kernels == "triton, captured, 2 ranks through gloo, emulated"


def test_fully_sharded(tmp_path: Path, start: Callable) -> None:
    zoo = make_kinds("qwen3", tmp_path)
    names = [name for name in zoo.names if name not in UNSHARED]
    compare(zoo, start, names, tensor_parallel=2, fully_sharded_loras=True, **SIZES)
