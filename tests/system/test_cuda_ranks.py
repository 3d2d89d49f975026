"""Ranks on emulated devices, a process each, give the tokens of transformers and PEFT: gloo
exchanges in the place of NCCL, and recorded steps are computed anew."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_svc.core import EngineConfig, Nodes
from inference_svc.engine.ranks.nodes.node import Node, check_node
from inference_svc.errors import EngineFailed
from tests.support import forks
from tests.support.gpu.emulated_ranks import FAILS, emulated_ranks
from tests.support.kernels.worker_process import Operations, Worker
from tests.support.models.parity import prompts
from tests.support.models.zoo import make_zoo
from tests.support.servers.links import LOCAL
from tests.system.engines import DEFAULTS, Running, SavedStore
from tests.system.kinds import EXPERTS, NUM_TOKENS, OWN, SUM, UNSHARED, Kinds, compare, make_kinds

pytestmark = [pytest.mark.processes, pytest.mark.slow]
LONG = pytest.mark.long
SIZES = {"max_sequences": 8, "max_batch_tokens": 64}


@pytest.fixture
def devices(start: Callable[..., Running]) -> Iterator[None]:
    """Torch computes in the place of Triton."""
    with emulated_ranks(forks.rank_command):
        yield


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("qwen3", {"tensor_parallel": 2}, id="ranks"),
        pytest.param("gemma2", {"tensor_parallel": 2}, id="gemma2", marks=LONG),
        pytest.param("qwen3", {"pipeline_parallel": 2}, id="stages"),
        pytest.param(
            "gemma2",
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            id="ranks of stages",
            marks=LONG,
        ),
        pytest.param("mixtral", {"tensor_parallel": 2, "expert_parallel": 2}, id="experts"),
        pytest.param(
            "mixtral",
            {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2},
            id="experts of stages",
            marks=LONG,
        ),
    ],
)
def test_all_kinds(
    tmp_path: Path, kind: str, settings: dict[str, int], start: Callable[..., Running]
) -> None:
    zoo = make_kinds(kind, tmp_path)
    running = compare(zoo, start, **settings, **SIZES)
    backend = running.engine.built.engine.runner.backend
    count = math.prod(settings.get(f"{name}_parallel", 1) for name in ("tensor", "pipeline"))
    assert backend.kernels == f"triton, captured, {count} ranks through gloo, emulated"
    assert backend.num_eager_steps < NUM_TOKENS, "decode steps are replayed"


@pytest.mark.usefixtures("devices")
def test_more_than_a_and_b_in_another_stage(tmp_path: Path, start: Callable[..., Running]) -> None:
    """No other adapter of the step has any in the first stage: all replay the same kind of step."""
    [head] = (spec for spec in OWN if spec.name == "head")
    zoo = make_kinds("qwen3", tmp_path, own=[head])
    compare(zoo, start, ["head"], pipeline_parallel=2, **SIZES)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 2},
        pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, marks=LONG),
    ],
    ids=str,
)
def test_devices_of_two_machines(
    tmp_path: Path, settings: dict[str, int], start: Callable[..., Running]
) -> None:
    """Each machine has as many ranks, which meet at an address of the first one."""
    zoo, stores = make_kinds("qwen3", tmp_path, own=[]), SavedStore(tmp_path / "store0")
    with socket.create_server((LOCAL, 0)) as server:
        rendezvous = f"{LOCAL}:{server.getsockname()[1]}"
    nodes = Nodes(2, 0, rendezvous, 120.0, "a secret of both")

    def join(config: EngineConfig) -> None:
        """Runs the second machine, whose ranks end with this thread."""
        machine = Node(config, check_node(config), stores)
        machine.wait_for_end(600.0)
        machine.close()

    def begin(kind: Kinds, **changes: Any) -> Running:
        of_second = {"nodes": replace(nodes, index=1), **changes}
        config = replace(EngineConfig(kind.model_dir, kind.kind), **DEFAULTS | of_second)
        threading.Thread(target=join, args=(config,), daemon=True).start()
        return start(kind, nodes=nodes, **changes)

    running = compare(zoo, begin, **settings, **SIZES)
    count = len(running.engine.built.ranks.others) + 1
    backend = running.engine.built.engine.runner.backend
    assert backend.kernels == f"triton, captured, {count} ranks through gloo, emulated"
    names = [each.name for each in running.engine.built.ranks.others]
    assert sum(name.endswith(" on node 1") for name in names) == count // 2


@LONG
@pytest.mark.usefixtures("devices")
def test_fully_sharded(tmp_path: Path, start: Callable[..., Running]) -> None:
    zoo = make_kinds("qwen3", tmp_path)
    names = [name for name in zoo.names if name not in UNSHARED]
    compare(zoo, start, names, tensor_parallel=2, fully_sharded_loras=True, **SIZES)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"tensor_parallel": 2}, signal.SIGKILL),
        pytest.param({"pipeline_parallel": 2}, signal.SIGKILL, marks=LONG),
        pytest.param({"pipeline_parallel": 2}, signal.SIGSTOP, marks=LONG),
        pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, signal.SIGKILL, marks=LONG),
    ],
    ids=str,
)
def test_a_rank_that_ends_is_named(
    tmp_path: Path, settings: dict[str, int], number: int, start: Callable[..., Running]
) -> None:
    """The last one, whose values others wait for."""
    running = start(make_zoo("llama", tmp_path), **settings, **SIZES)
    other = running.engine.built.ranks.local[-1]
    running.submit("long", [5, 6, 7], max_tokens=200)
    running.until(lambda: running.outputs.get("long"))
    os.kill(other.pid, number)
    running.until(lambda: running.is_done("long"), 120.0)
    error = running.result("long")[1].error
    assert isinstance(error, EngineFailed)
    how = "was ended by SIGKILL" if number == signal.SIGKILL else "does not answer"
    assert f"rank {other.rank.index} {how}" in str(error)


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
    ("kind", "names", "settings"),
    [
        pytest.param("qwen3", ["", "plain"], {}, id="few", marks=pytest.mark.artifacts),
        pytest.param("qwen3", [], {}, id="all", marks=LONG),
        pytest.param("qwen3", [], {"fully_sharded_loras": True}, id="fully sharded", marks=LONG),
        pytest.param(
            *("qwen3", ["", "plain", "head"], {"tensor_parallel": 1, "pipeline_parallel": 2}),
            id="stages",
            marks=LONG,
        ),
        pytest.param(
            *("mixtral", ["", "plain", EXPERTS], {"expert_parallel": 2}), id="experts", marks=LONG
        ),
    ],
)
def test_interpreted_kernels(
    tmp_path: Path, worker: Operations, kind: str, names: list[str], settings: dict[str, Any]
) -> None:
    """Of adapters of all kinds, and of a sum of shrunk rows between Triton's kernels."""
    zoo = make_kinds(kind, tmp_path)
    refused = UNSHARED if settings.get("fully_sharded_loras") else {}
    names = names or ["", *(name for name in (*zoo.adapter_dirs, SUM) if name not in refused)]
    asked = list(zip(names, prompts(len(names)), [3] * len(names), strict=True))
    sizes = {"max_model_len": 64, "page_size": 4, "kv_bytes": 1 << 20, "arena_bytes": 2 << 20}
    changes = {**sizes, **SIZES, "tensor_parallel": 2, "max_added_tokens": 2, **settings}
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
