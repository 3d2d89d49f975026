"""Pictures on several processes: greedy tokens are those of transformers and PEFT in fp32, for the
base and adapters of each part. The first process alone has the tower; others get embeddings."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contract.images.targets import Held
from inference_svc.backends.pictures import PictureRows
from inference_svc.core import BatchRow, EngineConfig, Nodes
from inference_svc.engine.build import describe
from inference_svc.engine.ranks.nodes.node import Node, check_node
from inference_svc.engine.transport.messages import Command
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.sharding.pictures import has_tower, takes_pictures
from inference_svc.pictures.prompt import PictureWork
from tests.support.pairs import crossed
from tests.support.pictures.contents import FURTHER
from tests.support.servers.links import LOCAL
from tests.system.engines import DEFAULTS, Running, SavedStore
from tests.system.picture_readers import (
    CASES,
    PROMPTS,
    SETTINGS,
    Reader,
    check_answer,
    check_greedy,
    check_steps,
    submit,
)

SHAPES: dict[str, dict[str, int]] = {
    "ranks": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "ranks of stages": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "experts": {"tensor_parallel": 2, "expert_parallel": 2},
    "sharded adapters": {"tensor_parallel": 2, "fully_sharded_loras": True},
}
MODELS = ("Llava", "Gemma3", "Mistral3", "SmolVLM", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5")
"""Taps and several positions; positions and recurrent layers; tokens that see each other; tiles."""


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *crossed({("Qwen3VL", "ranks"), ("Gemma3", "stages")}, MODELS, ("ranks", "stages")),
        *crossed({}, ("Qwen3VL", "Gemma3"), ("ranks of stages", "sharded adapters")),
        *crossed({}, ("Qwen3VLMoe",), ("ranks", "stages", "experts")),
        *crossed({}, ("Gemma4", "Gemma4Small"), ("ranks",)),
    ],
)
@pytest.mark.parametrize(
    "path", [True, pytest.param(False, marks=pytest.mark.long)], ids=["native", "torch"]
)
def test_greedy_tokens_equal_transformers_and_peft(
    name: str,
    shape: str,
    path: bool,
    readers: Callable[[str], Reader],
    start: Callable[..., Running],
) -> None:
    """One and three pictures, and text alone, of the base and adapters of each part."""
    reader = readers(name)
    check_greedy(reader, start(reader.zoo, native_kernels=path, **SETTINGS, **SHAPES[shape]))


@pytest.fixture(scope="module", params=["Qwen3VL", "Gemma3"])
def stepped(request: pytest.FixtureRequest, readers: Callable[[str], Reader]) -> Reader:
    return readers(request.param)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["ranks", "stages"])
@pytest.mark.parametrize("case", CASES)
def test_answers_do_not_depend_on_steps(
    stepped: Reader, case: str, shape: str, start: Callable[..., Running]
) -> None:
    check_steps(stepped, case, start, "of-all", **SHAPES[shape])


@pytest.fixture(scope="module")
def qwen3(readers: Callable[[str], Reader]) -> Reader:
    return readers("Qwen3VL")


def test_taps_in_another_stage(qwen3: Reader, start: Callable[..., Running]) -> None:
    """Its layers add embeddings, which come to it from the first stage. Tower and connector are on
    the first process alone, also in memory and in adapters; and after sleep."""
    running = start(qwen3.zoo, **SETTINGS, **SHAPES["stages"])
    backend = running.engine.built.engine.runner.backend
    config = EngineConfig(qwen3.zoo.model_dir, "model", **DEFAULTS | SETTINGS | SHAPES["stages"])
    second = describe(config, 1)
    assert takes_pictures(second)
    assert not has_tower(second)
    layouts = (running.engine.layout, *running.engine.other_layouts)
    held = [{each.held for each in one.targets if each.is_of_pictures} for one in layouts]
    assert held == [{Held.HERE}, {Held.ELSEWHERE}]
    for _ in range(2):
        for adapter, prompt in (("of-all", "three"), ("of-tower", "one"), ("", "text")):
            request_id = submit(running, qwen3, adapter, prompt)
            check_answer(running, request_id, qwen3, adapter, prompt)
        assert backend.pictures.num_bytes > 0
        running.call(Command.SLEEP, frees_weights=True)
        assert backend.pictures.num_bytes == backend.weights_bytes == 0
        running.call(Command.WAKE)
    assert backend.pictures.weights_bytes > 0
    # The scheduler counts units for the threads of the first process, which has the tower.
    counted = running.engine.built.engine.scheduler.pictures.costs.units
    assert counted == qwen3.pictures.units(torch.get_num_threads())
    running.check_idle()


@pytest.mark.parametrize("shape", ["ranks", pytest.param("stages", marks=pytest.mark.long)])
def test_work_that_fails_harms_only_its_request(
    qwen3: Reader, shape: str, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes do not wait for embeddings that will not come: they hear of a step when the
    tower has done its part."""
    running = start(qwen3.zoo, **SETTINGS, **SHAPES[shape])
    apply, placed = PictureRows.apply, PictureRows.placed

    def fail(rows: PictureRows, work: PictureWork) -> None:
        if work.encodes:
            raise MemoryError
        apply(rows, work)

    def fail_again(rows: PictureRows, batch: Sequence[BatchRow]) -> tuple[PlacedRows, ...]:
        if any(row.sequence.request.request_id.startswith("of-text three") for row in batch):
            raise ValueError("its tower")
        return placed(rows, batch)

    monkeypatch.setattr(PictureRows, "apply", fail)
    monkeypatch.setattr(PictureRows, "placed", fail_again)
    cells = [(adapter, name) for adapter in ("of-text", "of-all") for name in PROMPTS]
    with running.together():
        ids = {cell: submit(running, qwen3, *cell) for cell in cells}
    for cell, request_id in ids.items():
        tokens, last = running.result(request_id)
        if cell == ("of-text", "three"):
            assert last.error is not None
        else:
            assert (tokens, last.error) == (qwen3.expected(*cell, tokens), None), cell
    running.check_idle()


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen3_5", "Gemma3"])
def test_a_step_that_lacks_memory_once(
    name: str,
    readers: Callable[[str], Reader],
    start: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is computed in parts, with the right states, and with whole pictures."""
    placed, failed = PictureRows.placed, list[int]()

    def fail_once(rows: PictureRows, batch: Sequence[BatchRow]) -> tuple[PlacedRows, ...]:
        found = placed(rows, batch)
        if found and len(batch) > 1 and not failed:
            failed.append(len(batch))
            raise MemoryError
        return found

    reader = readers(name)
    running = start(reader.zoo, **SETTINGS, **SHAPES["ranks"])
    monkeypatch.setattr(PictureRows, "placed", fail_once)
    cells = [(adapter, each) for adapter in ("", "of-all") for each in PROMPTS]
    with running.together():
        ids = {cell: submit(running, reader, *cell) for cell in cells}
    for cell, request_id in ids.items():
        check_answer(running, request_id, reader, *cell)
    assert failed
    running.check_idle()


@pytest.mark.long
@pytest.mark.parametrize("shape", ["ranks", "stages", "ranks of stages"])
@pytest.mark.parametrize("kind", ["magnitudes", "base-biases", "norms-of-qwen3", "whole-taps"])
def test_contents_besides_a_and_b(
    kind: str, shape: str, tmp_path: Path, start: Callable[..., Running]
) -> None:
    """Processes without the tower divide no magnitudes of it, and go along."""
    cells = [(each.name, name) for each in FURTHER[kind] for name in ("one", "three")]
    with closing(Reader("Qwen3VL", tmp_path / "reader", FURTHER[kind])) as reader:
        running = start(reader.zoo, **SETTINGS, **SHAPES[shape])
        ids = {cell: submit(running, reader, *cell) for cell in cells}
        for cell, request_id in ids.items():
            tokens, last = running.result(request_id)
            assert (tokens, last.error) == (reader.expected(*cell, tokens), None), cell
    running.check_idle()


@pytest.mark.long
@pytest.mark.parametrize("shape", ["ranks", "stages"])
def test_two_machines(qwen3: Reader, shape: str, tmp_path: Path, start: Callable) -> None:
    """Embeddings come through the network."""
    with socket.create_server((LOCAL, 0)) as server:
        rendezvous = f"{LOCAL}:{server.getsockname()[1]}"
    nodes = Nodes(2, 0, rendezvous, 120.0, "a secret of both")
    settings = DEFAULTS | SETTINGS | SHAPES[shape] | {"nodes": replace(nodes, index=1)}
    config = EngineConfig(qwen3.zoo.model_dir, qwen3.zoo.kind, **settings)

    def join() -> None:
        """Runs the second machine, whose ranks end with this thread."""
        machine = Node(config, check_node(config), SavedStore(tmp_path / "store0"))
        machine.wait_for_end(600.0)
        machine.close()

    threading.Thread(target=join, daemon=True).start()
    running = start(qwen3.zoo, nodes=nodes, **SETTINGS, **SHAPES[shape])
    assert running.engine.built.engine.runner.backend.kernels.endswith("2 ranks through gloo")
    check_greedy(qwen3, running)
