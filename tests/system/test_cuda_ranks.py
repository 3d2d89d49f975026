"""Ranks on emulated devices, a process each, give the tokens of transformers and PEFT: gloo
exchanges in the place of NCCL, and recorded steps are computed anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inference_svc.errors import EngineFailed
from tests.support.gpu.emulated_ranks import FAILS, emulated_ranks
from tests.support.kernels.worker_process import Operations, Worker
from tests.support.models.parity import prompts
from tests.support.models.zoo import make_zoo
from tests.system.engines import Running
from tests.system.kinds import NUM_TOKENS, SUM, UNSHARED, Kinds, compare, make_kinds

pytestmark = [pytest.mark.processes, pytest.mark.slow]
LONG = pytest.mark.long
SIZES = {"max_sequences": 8, "max_batch_tokens": 64}


@pytest.fixture
def devices(start: Callable[..., Running]) -> Iterator[None]:
    """Torch computes in the place of Triton. Ranks are programs, not the forks of `start`."""
    with emulated_ranks():
        yield


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gemma2", marks=LONG)])
def test_all_kinds(tmp_path: Path, kind: str, start: Callable[..., Running]) -> None:
    zoo = make_kinds(kind, tmp_path)
    running = compare(zoo, start, tensor_parallel=2, **SIZES)
    backend = running.engine.built.engine.runner.backend
    assert backend.kernels == "triton, captured, 2 ranks through gloo, emulated"
    assert backend.num_eager_steps < NUM_TOKENS, "decode steps are replayed"


@LONG
@pytest.mark.usefixtures("devices")
def test_fully_sharded(tmp_path: Path, start: Callable[..., Running]) -> None:
    zoo = make_kinds("qwen3", tmp_path)
    names = [name for name in zoo.names if name not in UNSHARED]
    compare(zoo, start, names, tensor_parallel=2, fully_sharded_loras=True, **SIZES)


@pytest.mark.usefixtures("devices")
def test_a_rank_that_ends_is_named(tmp_path: Path, start: Callable[..., Running]) -> None:
    running = start(make_zoo("llama", tmp_path), tensor_parallel=2, **SIZES)
    [other] = running.engine.built.ranks.local
    running.submit("long", [5, 6, 7], max_tokens=200)
    running.until(lambda: running.outputs.get("long"))
    os.kill(other.pid, signal.SIGKILL)
    error = running.result("long")[1].error
    assert isinstance(error, EngineFailed)
    assert "rank 1 was ended by SIGKILL" in str(error)


@pytest.mark.usefixtures("devices")
def test_a_rank_that_cannot_record_ends_the_start(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILS, "1")
    with pytest.raises(RuntimeError, match="rank 1: no room for a recording"):
        start(make_zoo("llama", tmp_path), tensor_parallel=2, **SIZES)


@pytest.fixture(scope="module")
def worker() -> Iterator[Operations]:
    made = Worker(interpret=True)
    yield Operations(made, Path(__file__).parent / "emulated_ranks.py")
    made.close()


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        pytest.param(["", "plain"], {}, id="few", marks=pytest.mark.artifacts),
        pytest.param([], {}, id="all", marks=LONG),
        pytest.param([], {"fully_sharded_loras": True}, id="fully sharded", marks=LONG),
    ],
)
def test_interpreted_kernels(
    tmp_path: Path, worker: Operations, names: list[str], settings: dict[str, bool]
) -> None:
    """Of adapters of all kinds, and of a sum of shrunk rows between Triton's kernels."""
    zoo = make_kinds("qwen3", tmp_path)
    refused = UNSHARED if settings else {}
    names = names or ["", *(name for name in (*zoo.adapter_dirs, SUM) if name not in refused)]
    asked = list(zip(names, prompts(len(names)), [3] * len(names), strict=True))
    sizes = {"max_model_len": 64, "page_size": 4, "kv_bytes": 1 << 20, "arena_bytes": 2 << 20}
    changes = {**sizes, **SIZES, **settings, "tensor_parallel": 2, "max_added_tokens": 2}
    requests = [(name, zoo.prompt_of(name, prompt[:9]), count) for name, prompt, count in asked]
    found = worker.call(
        "generate", zoo.model_dir, zoo.adapter_dirs, requests, changes, tmp_path / "s"
    )
    for (name, prompt, _), tokens in zip(requests, found, strict=True):
        assert tokens == greedy(zoo, name, prompt, tokens), name


def greedy(zoo: Kinds, name: str, prompt: list[int], tokens: list[int]) -> list[int]:
    """Returns the oracle's tokens, each behind the ones before that were given."""
    logits = zoo.of(name).logits(name, prompt + tokens[:-1], torch.float32)
    found: list[int] = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return found
