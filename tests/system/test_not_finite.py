"""Adapters whose values are infinite, no numbers, huge or tiny, in whatever they have: their own
requests end by name, or give what is finite. All others have the same tokens as without them. Their
scores are the same bits with native kernels, and close where torch multiplies: its products depend
a little on how many rows there are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapter_store.images.compile import Image
from contract.images.dtypes import DataType
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind
from inference_svc.core import Part, Sum
from inference_svc.engine.transport.messages import Command, Output
from inference_svc.errors import AdapterUnusable, NotFinite
from inference_svc.results.base import of_kind
from inference_svc.results.chosen_logits import ChosenLogitsOption
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.logprobs import LogprobsMode, TokenLogprobs
from inference_svc.results.scores import Scores
from loadout.errors import FailedPrecondition
from loadout.prometheus import scrape
from tests.support.models.trained import WEIGHTS
from tests.support.models.zoo import PARAMETERS, AdapterSpec, Zoo, adapted, make_model
from tests.system.embedded import option
from tests.system.engines import Running
from tests.system.kinds import ADDED, Kinds, make_kinds
from tests.system.services import Services

DTYPES = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
}
TOLERANCE = 1e-3
HALF_TOLERANCE = 1e-2  # a unit in the last place of a logit from 8 to 16, in float16
PROMPT = list(range(10, 31))
PLANTED = [math.inf, -math.inf, math.nan, 3e38, -3e38, 1e30, 6e4, 1e-42, -0.0]
CHOICES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 5, "logprobs": 2},
    {"temperature": 1.3, "seed": 5, "top_p": 0.7, "min_p": 0.01},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"min_tokens": 3, "logprobs": 300, "logprobs_mode": LogprobsMode.PROCESSED},
    {"prompt_logprobs": 4, "logprobs": 1},
]
"""Every way of choosing and of scoring."""
POOLED: list[dict[str, Any]] = [
    {"max_tokens": 0, "embedding": option(Pooling.MEAN)},
    {"max_tokens": 0, "options": (ChosenLogitsOption(("a", "b"), (5, 6)),)},
]
"""Ways of pooling, for requests with planted values alone."""


@dataclasses.dataclass(frozen=True)
class Planted:
    """What is written over an adapter: the value, in which of its segments, and where."""

    value: float
    segment: int
    place: float
    count: int


def planted() -> st.SearchStrategy[list[Planted]]:
    one = st.builds(
        Planted,
        st.sampled_from(PLANTED),
        st.integers(0, 200),
        st.floats(0, 0.999),
        st.sampled_from([1, 7, 100_000]),
    )
    return st.lists(one, min_size=1, max_size=3)


RUNS = {
    "native": ("qwen3", {}),
    "torch": ("qwen3", {"native_kernels": False}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "float16": ("qwen3", {"dtype": "float16"}),
    "capped": ("gemma2", {}),
    "chunks": ("qwen3", {"max_prefill_chunk": 7}),
    "experts, native": ("qwen3-moe", {}),
    "experts, torch": ("gpt-oss", {"native_kernels": False}),
}


@pytest.fixture(scope="module")
def zoo_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Zoo]:
    made: dict[str, Zoo] = {}

    def find(kind: str) -> Zoo:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = _experts(kind, folder) if "-" in kind else make_kinds(kind, folder)
        return made[kind]

    return find


def _experts(kind: str, folder: Any) -> Zoo:
    model = make_model(kind, folder / "model")
    options = {"target_parameters": list(PARAMETERS[kind][:2])}
    specs = [AdapterSpec(name, 4, [], options) for name in ("plain", "small")]
    reference = adapted(model, kind, folder / "adapters", specs)
    return Zoo(
        kind, folder / "model", reference, {s.name: folder / "adapters" / s.name for s in specs}
    )


@pytest.mark.parametrize("max_examples", [10, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("run", RUNS)
def test_what_is_planted_ends_its_own_requests_alone(
    run: str, max_examples: int, zoo_of: Callable[[str], Zoo], start: Callable[..., Running]
) -> None:
    kind, changes = RUNS[run]
    zoo = zoo_of(kind)
    added = len(ADDED) if isinstance(zoo, Kinds) else 0
    running = start(zoo, max_added_tokens=added, max_model_len=128, **changes)
    names = list(zoo.adapter_dirs)
    tolerance = {"native": 0, "float16": HALF_TOLERANCE}.get(run, TOLERANCE)
    beside(running, "first")  # loads the adapter and fills the prefix cache: later steps are alike
    wanted = beside(running, "wanted")
    ended = 0

    @settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(
        name=st.sampled_from(names),
        changes=planted(),
        choices=st.lists(st.sampled_from(CHOICES + POOLED), min_size=1, max_size=3),
        scale=st.sampled_from([None, None, -1.0, 100.0, 0.0]),
    )
    # Else none of a few random ones may end a request.
    @example(names[0], [Planted(math.nan, 0, 0.0, 100_000)], [{}], None)
    def check(name: str, changes: list[Planted], choices: list[dict], scale: float | None) -> None:
        nonlocal ended
        digest = plant(running, name, changes)
        if scale is not None:
            parts = (Part(digest, scale), Part(running.digests["plain"], 0.5))
            digest = Sum(parts)
        run_id = f"{len(running.outputs)}"
        for index, choice in enumerate(choices):
            fields = {"max_tokens": 6} | choice
            running.submit(f"{run_id} planted {index}", PROMPT, digest, **fields)
        found = beside(running, run_id)
        for index in range(len(choices)):
            _, last = running.result(f"{run_id} planted {index}")
            if last.error is not None:
                assert isinstance(last.error, NotFinite | AdapterUnusable), last.error
                ended += isinstance(last.error, NotFinite)
        counted = running.engine.built.engine.losses.counts
        assert sum(counted.values()) == ended, "a fault, or one that was not told"
        assert found.chosen == wanted.chosen
        if run != "float16":
            assert found.listed == wanted.listed
        assert found.scores == pytest.approx(wanted.scores, rel=0, abs=tolerance)

    check()
    assert ended > 0
    running.check_idle()


@dataclasses.dataclass
class Answers:
    """All that some requests answered: their tokens and reasons, their scores in order, and the
    tokens of the scores (two of which may change places where the products are not the same)."""

    chosen: list[object] = dataclasses.field(default_factory=list)
    listed: list[object] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)

    def add(self, output: Output) -> None:
        assert output.error is None
        self.chosen.append((output.token_ids, output.finish_reason))
        scores, tokens = of_kind(output.parts, Scores), of_kind(output.parts, TokenLogprobs)
        self.listed.extend(part.token_ids.tolist() for part in scores)
        self.listed.append([each.token_id for each in tokens])
        for part in scores:
            self.scores.extend(part.logprobs.tolist())
        self.scores.extend(each.logprob for each in tokens)


def beside(running: Running, run_id: str) -> Answers:
    """Runs the base model and an adapter, in every way, and returns all that they answer."""
    for name in ("", "plain"):
        for index, choice in enumerate(CHOICES):
            running.submit(f"{run_id} {name} {index}", PROMPT, name, max_tokens=4, **choice)
    found = Answers()
    for name in ("", "plain"):
        for index in range(len(CHOICES)):
            running.result(f"{run_id} {name} {index}")
            for output in running.outputs[f"{run_id} {name} {index}"]:
                found.add(output)
    return found


def plant(running: Running, name: str, changes: list[Planted]) -> str:
    """Adds an image of other content to the store, all of whose hashes are right; returns its
    digest."""
    store = running.store
    image = store.image(running.digests[name])
    targets, buffer = store.layout.targets, image.buffer.clone()
    segments = [s for s in image.plan.segments if s.kind is not SegmentKind.ROW_IDS]
    for change in changes:
        segment = segments[change.segment % len(segments)]
        values = buffer[segment.offset : segment.offset + segment.length_bytes]
        if targets[segment.target].kind is TargetKind.EXPERTS:
            values = values[16 * targets[segment.target].experts :]  # behind the index
        values = values.view(DTYPES[segment.dtype])
        first = int(change.place * len(values))
        values[first : first + change.count] = change.value
    digest = "sha256:" + hashlib.sha256(repr((name, changes)).encode()).hexdigest()
    parts = tuple(
        dataclasses.replace(
            part, sha256=hashlib.sha256(buffer[part.start : part.end].numpy()).digest()
        )
        for part in image.parts
    )
    plan = dataclasses.replace(image.plan, digest=digest, image_id=digest)
    store.folders[digest] = store.folders[running.digests[name]]
    store.put(digest, Image(plan, buffer, parts))
    return digest


def test_marks_outlive_the_memory_and_are_of_each_part(
    zoo_of: Callable[[str], Zoo], start: Callable[..., Running]
) -> None:
    """An adapter that is evicted and loaded again is as marked as before."""
    running = start(zoo_of("qwen3"), max_added_tokens=len(ADDED))
    huge = plant(running, "small", [Planted(3e38, number, 0.0, 100_000) for number in range(2)])
    plain = running.digests["plain"]
    for number, digest in enumerate((huge, Sum((Part(plain), Part(huge))), plain)):
        running.submit(f"{number}", PROMPT, digest, max_tokens=2)
    errors = [type(running.result(f"{number}")[1].error) for number in range(3)]
    assert errors == [NotFinite, NotFinite, type(None)]
    assert marks(running) == {huge: 2, plain: 1}
    assert running.call(Command.UNLOAD, huge).error is None
    assert marks(running) == {plain: 1}
    assert running.call(Command.LOAD, huge).error is None
    assert marks(running) == {huge: 2, plain: 1}
    running.check_idle()


def marks(running: Running) -> dict[str, int]:
    """Returns what operators see of each adapter on the device."""
    residents: Any = running.call(Command.LIST_RESIDENT).result
    return {each.digest: each.num_not_finite for each in residents if each.tier == "device"}


@pytest.mark.processes
def test_an_adapter_that_diverged_disturbs_nobody(
    zoos: Callable[[str], Zoo], tmp_path: Path
) -> None:
    """Both services: it is registered, as its values are finite; its requests end by name over both
    transports, others go on, and operators see which adapter it is."""
    flags = ("--http", "127.0.0.1:0")
    with Services(zoos("llama"), tmp_path, inference_flags=flags) as services:
        huge = Path(services.source("r16", "huge").removeprefix("file://"))
        tensors = {name: each.sign() * 1e30 for name, each in load_file(huge / WEIGHTS).items()}
        save_file(tensors, huge / WEIGHTS)
        client = services.client
        client.register("huge", f"file://{huge}")
        client.register("sound", services.source("r3"))
        options: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}
        wanted = client.complete(PROMPT, adapter="sound", **options).token_ids
        stream = client.generate(PROMPT, adapter="sound", **options)
        found = list(next(stream).token_ids)
        for _ in range(3):
            with pytest.raises(FailedPrecondition, match="huge@1 are not finite") as caught:
                client.complete(PROMPT, adapter="huge", max_tokens=4)
            assert caught.value.reason == "VALUES_NOT_FINITE"
        for chunk in stream:
            found += chunk.token_ids
        assert found == list(wanted)
        address = json.loads((tmp_path / "inference.json").read_text())["http"]
        body = {"model": "huge", "prompt": PROMPT, "max_tokens": 4}
        answer = httpx2.post(f"http://{address}/v1/completions", json=body, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "values_not_finite")
        assert error["param"] == "model"
        counted = {each.label: each.not_finite_requests for each in client.residents()}
        assert {name.partition("@")[0]: count for name, count in counted.items()} == {
            "default/huge": 4,
            "default/sound": 0,
        }
        metrics = scrape(services.inference_metrics)
        assert metrics.one("loadout_inference_not_finite_requests_total") == 4
    assert services.exit_codes == [0, 0]
