"""Pictures on an emulated device: greedy tokens are those of transformers and PEFT, in recorded
steps, which are computed anew, and in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from inference_svc.backends.base import Logits
from inference_svc.backends.cuda.backend import CudaBackend, PreparedStep
from inference_svc.backends.cuda.rank import CudaRank
from inference_svc.core import Batch
from inference_svc.engine.transport.messages import Command
from tests.support import forks
from tests.support.gpu.emulated_ranks import emulated_ranks
from tests.support.kernels.worker_process import Operations, Worker
from tests.support.pictures.models import NAMES
from tests.system.emulated import Plain
from tests.system.engines import Running
from tests.system.picture_readers import (
    PROMPTS,
    SETTINGS,
    Reader,
    check_answer,
    submit,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]


QUICK = ("SmolVLM", "Qwen2_5_VL", "Qwen3VL", "Gemma3")
"""Models with tiles; with windows and positions of rows and columns; with taps; and whose pictures'
tokens see each other."""


FEW_STEPS = SETTINGS | {"max_sequences": 16, "max_batch_tokens": 256, "max_prefill_chunk": 128}
"""All requests of a test fit in a step, and few shapes of steps are recorded at each start."""


@pytest.fixture
def device(start: Callable[..., Running]) -> Iterator[None]:
    """Torch computes in the place of Triton."""
    with emulated_ranks(forks.rank_command):
        yield


def check_all(reader: Reader, running: Running) -> None:
    """One and three pictures, and text alone, of the base and all adapters, in one batch."""
    cells = [(a, n) for a in ("", *reader.zoo.adapter_dirs) for n in PROMPTS]
    ids = {cell: submit(running, reader, *cell) for cell in cells}
    for (adapter, prompt), request_id in ids.items():
        check_answer(running, request_id, reader, adapter, prompt)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in NAMES]
)
def test_greedy_tokens_equal_transformers_and_peft(
    name: str,
    readers: Callable[[str], Reader],
    start: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One and three pictures, and text alone, of the base and adapters of each part, in one batch.
    Embeddings are at fixed addresses in recorded steps, and where they are in others."""
    counts = {"recorded": 0, "others": 0}
    prepare = CudaBackend.prepare

    def count(backend: CudaBackend, batch: Batch) -> PreparedStep:
        prepared = prepare(backend, batch)
        if prepared.placed:
            counts["others" if prepared.shape is None else "recorded"] += 1
        return prepared

    monkeypatch.setattr(CudaBackend, "prepare", count)
    reader = readers(name)
    running = start(reader.zoo, **FEW_STEPS)
    assert running.engine.built.engine.runner.backend.kernels == "triton, captured"
    check_all(reader, running)
    assert counts["recorded"] > 0
    more = submit(running, reader, "of-all", "three", prompt_logprobs=0, cache_seed="scored")
    check_answer(running, more, reader, "of-all", "three")
    assert counts["others"] > 0, "recorded steps do not keep hidden states"
    running.check_idle()


LONG = pytest.mark.long


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qwen3VL", {"tensor_parallel": 2}),
        pytest.param("Gemma3", {"tensor_parallel": 2}, marks=LONG),
        pytest.param("SmolVLM", {"tensor_parallel": 2}, marks=LONG),
        pytest.param("Qwen3VL", {"pipeline_parallel": 2}, marks=LONG),
        pytest.param("Gemma3", {"pipeline_parallel": 2}, marks=LONG),
        pytest.param("Qwen3VL", {"tensor_parallel": 2, "pipeline_parallel": 2}, marks=LONG),
        pytest.param("Qwen3VLMoe", {"tensor_parallel": 2, "expert_parallel": 2}, marks=LONG),
    ],
    ids=str,
)
def test_ranks_read_pictures(
    name: str,
    shape: dict[str, int],
    readers: Callable[[str], Reader],
    start: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other devices get embeddings: to fixed addresses for recorded steps, and for others."""
    counts = {"recorded": 0, "others": 0}
    forward = CudaRank.forward

    def count(backend: CudaRank, inputs: PreparedStep) -> Logits:
        if inputs.placed:
            counts["others" if inputs.shape is None else "recorded"] += 1
        return forward(backend, inputs)

    monkeypatch.setattr(CudaRank, "forward", count)
    reader = readers(name)
    running = start(reader.zoo, **FEW_STEPS, **shape)
    assert "ranks through gloo" in running.engine.built.engine.runner.backend.kernels
    check_all(reader, running)
    more = submit(running, reader, "of-all", "three", prompt_logprobs=0, cache_seed="scored")
    check_answer(running, more, reader, "of-all", "three")
    assert min(counts.values()) > 0, counts
    running.call(Command.SLEEP, frees_weights=True)
    running.call(Command.WAKE)
    again = submit(running, reader, "of-all", "three", cache_seed="again")
    check_answer(running, again, reader, "of-all", "three")
    running.check_idle()


@pytest.mark.usefixtures("device")
def test_a_sleeping_device_has_no_tower(
    readers: Callable[[str], Reader], start: Callable[..., Running]
) -> None:
    reader = readers("SmolVLM")
    running = start(reader.zoo, **FEW_STEPS)
    for _ in range(2):
        request_id = submit(running, reader, "of-all", "three", cache_seed="again")
        check_answer(running, request_id, reader, "of-all", "three")
        backend = running.engine.built.engine.runner.backend
        assert backend.pictures.num_bytes > 0
        held = backend.pictures.num_bytes + backend.kv_bytes + backend.weights_bytes
        assert running.call(Command.SLEEP, frees_weights=True).result == held
        assert backend.pictures.num_bytes == backend.weights_bytes == 0
        running.call(Command.WAKE)
    running.check_idle()


INTERPRETED = ("Qwen2_5_VL", "SmolVLM", "Gemma3", "Mistral3")
"""Models with windows and several positions; with tiles; whose pictures' tokens see each other; and
with rows of any number."""
NUM_INTERPRETED = 3


@pytest.mark.artifacts
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_read_pictures(name: str, tmp_path: Path) -> None:
    """Triton's kernels, interpreted, with an adapter of all parts, beside a text."""
    worker = Worker(interpret=True)
    try:
        with closing(Reader(name, tmp_path / "reader")) as reader:
            operations = Operations(worker, Path(__file__).parent / "emulated.py")
            cells = [("", "one"), ("of-all", "one"), ("of-text", "text")]
            asked = [(a, *_asked(reader, prompt)) for a, prompt in cells]
            zoo, sizes = reader.zoo, SETTINGS | INTERPRETED_SIZES
            found = operations.call("generate", zoo.model_dir, zoo.adapter_dirs, [asked], sizes)
            for cell, (tokens, _) in zip(cells, found[0], strict=True):
                assert tokens == reader.expected(*cell, count=NUM_INTERPRETED), cell
    finally:
        worker.close()


INTERPRETED_SIZES = {
    "max_sequences": 4,
    "max_batch_tokens": 64,
    "max_prefill_chunk": 64,
    "arena_bytes": 4 << 20,
    "host_bytes": 4 << 20,
    "max_loras": 4,
}


def _asked(reader: Reader, name: str) -> tuple[list[int], int, list[Plain]]:
    prompt, pictures = reader.prompt(name)
    plain = [(p.digest, bytes(p.pixels.view), p.tile, p.num_tiles, p.runs) for p in pictures]
    return prompt, NUM_INTERPRETED, plain
