"""Every kind of adapter where a model is cut over ranks, against transformers + peft: the same
logits and greedy tokens as of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_svc.errors import AdapterUnusable
from tests.support.models.parity import prompts
from tests.support.models.zoo import AdapterSpec, Zoo, adapted, make_model
from tests.support.pairs import PATHS
from tests.system.kinds import (
    ADDED,
    NUM_TOKENS,
    UNSHARED,
    Kinds,
    begin,
    compare,
    make_kinds,
    shake_to_float8,
    to_float8,
)
from tests.system.sums import SUMS, check_sum, digest_of, summed

LONG = pytest.mark.long
KINDS = ["qwen3", *(pytest.param(each, marks=LONG) for each in ("gemma2", "cohere2"))]
RANKS = {"tensor_parallel": 2}
STAGES = {"pipeline_parallel": 2}
shapes = pytest.mark.parametrize(
    "shape",
    [
        RANKS,
        pytest.param({"tensor_parallel": 4}, marks=LONG),
        STAGES,
        pytest.param(RANKS | STAGES, marks=LONG),
    ],
    ids=str,
)
of_ranks = pytest.mark.parametrize(
    "shape",
    [RANKS, *(pytest.param(each, marks=LONG) for each in ({"tensor_parallel": 4}, RANKS | STAGES))],
    ids=str,
)
paths = pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=LONG)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kinds]:
    """Returns adapters of all kinds for a model, which tests share."""
    return cache(lambda kind: make_kinds(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module", params=KINDS)
def zoo(request: pytest.FixtureRequest, made: Callable[[str], Kinds]) -> Kinds:
    return made(request.param)


@paths
@shapes
def test_all_kinds_together_have_the_oracles_logits(
    zoo: Kinds, shape: dict[str, int], path: str, start: Callable
) -> None:
    compare(zoo, start, **shape, native_kernels=PATHS[path])


@paths
@of_ranks
def test_fully_sharded_adapters(
    zoo: Kinds, shape: dict[str, int], path: str, start: Callable
) -> None:
    """A and B are cut by inputs and by outputs; adapters that need all outputs are refused."""
    names = [name for name in zoo.names if name not in UNSHARED]
    settings = {**shape, "native_kernels": PATHS[path]}
    running = compare(zoo, start, names, fully_sharded_loras=True, **settings)
    for name, reason in UNSHARED.items():
        if name in zoo.adapter_dirs:
            running.submit(name, [5], name, max_tokens=1)
            error = running.result(name)[1].error
            assert isinstance(error, AdapterUnusable)
            assert f"has {reason}, which a server with --fully-sharded-loras" in str(error)
    running.check_idle()


@paths
@of_ranks
def test_float8_adapters_of_all_kinds(
    tmp_path: Path, shape: dict[str, int], path: str, start: Callable
) -> None:
    """Each rank's part of a matrix has a scale of its own."""
    zoo = make_kinds("qwen3", tmp_path, shake_to_float8)
    compare(zoo, start, **shape, adapter_dtype="fp8", native_kernels=PATHS[path])


@paths
@shapes
def test_sums_have_the_oracles_logits(
    made: Callable[[str], Kinds], shape: dict[str, int], path: str, start: Callable
) -> None:
    zoo = made("qwen3")
    settings = {"max_prefill_chunk": 24, "native_kernels": PATHS[path], **shape}
    running, recorder = begin(zoo, start, **settings)
    asked = dict(zip(SUMS, prompts(len(SUMS), seed=3), strict=True))
    asked["tokens that one adds"] += ADDED
    for name, prompt in asked.items():
        running.submit(name, prompt, digest_of(running, SUMS[name]))
    for name, prompt in asked.items():
        check_sum(summed(zoo, SUMS[name]), prompt, running, name, recorder.logits)
    running.check_idle()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=LONG),
        pytest.param({"adapter_dtype": "fp8"}, marks=LONG),
        {"fully_sharded_loras": True},
        pytest.param({"fully_sharded_loras": True, "expert_parallel": 2}, marks=LONG),
        pytest.param({"tensor_parallel": 1} | STAGES, marks=LONG),
        pytest.param({"expert_parallel": 2} | STAGES, marks=LONG),
    ],
    ids=str,
)
def test_experts_have_the_oracles_tokens(
    tmp_path: Path, settings: dict[str, Any], start: Callable
) -> None:
    """Two projections of all experts, and the router."""
    options = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    spec = AdapterSpec("experts", 4, ["q_proj", "o_proj"], options)
    model = make_model("mixtral", tmp_path / "model")
    reference = adapted(model, "mixtral", tmp_path / "adapters", [spec], to_float8)
    zoo = Zoo("mixtral", tmp_path / "model", reference, {spec.name: tmp_path / "adapters/experts"})
    running = start(zoo, **(RANKS | settings))
    names = [spec.name, ""]
    answers = [zoo.greedy(name, prompts(1)[0], NUM_TOKENS) for name in names]
    assert answers[0] != answers[1], "the adapter changes what is compared"
    for name, prompt in zip(names, prompts(len(names)), strict=True):
        running.submit(name or "base", prompt, name, max_tokens=NUM_TOKENS)
    for name, prompt in zip(names, prompts(len(names)), strict=True):
        tokens, last = running.result(name or "base")
        assert last.error is None, last.error
        assert tokens == zoo.greedy(name, prompt, NUM_TOKENS), name or "base"
    running.check_idle()


@pytest.mark.parametrize("shape", [STAGES, pytest.param(RANKS | STAGES, marks=LONG)], ids=str)
def test_adapters_of_one_stage(tmp_path: Path, shape: dict[str, int], start: Callable) -> None:
    """The others have an image without bytes."""
    specs = [
        AdapterSpec(f"layer {layer}", 4, ["q_proj"], {"layers_to_transform": [layer]})
        for layer in range(2)
    ]
    dirs = {spec.name: tmp_path / "adapters" / spec.name for spec in specs}
    model = make_model("llama", tmp_path / "model")
    reference = adapted(model, "llama", tmp_path / "adapters", specs)
    zoo = Zoo("llama", tmp_path / "model", reference, dirs)
    running = start(zoo, **shape)
    names = ["", *dirs]
    answers = {name: zoo.greedy(name, [5, 6, 7], NUM_TOKENS) for name in names}
    assert len({*map(tuple, answers.values())}) == 3, "adapters change what is compared"
    for turn in range(2):
        for name in names:
            running.submit(f"{turn} {name}", [5, 6, 7], name, max_tokens=NUM_TOKENS)
        for name in names:
            tokens, last = running.result(f"{turn} {name}")
            assert last.error is None, last.error
            assert tokens == answers[name], name or "base"
    running.check_idle()


@pytest.mark.parametrize("shape", [RANKS, STAGES, RANKS | STAGES], ids=str)
def test_magnitudes_that_another_rank_refuses_are_refused(
    tmp_path: Path, shape: dict[str, int], start: Callable
) -> None:
    """A zero row of the last rank's outputs, and of the last layer. Another adapter is not
    disturbed, nor is the next load of the same one."""
    base = make_model("llama", tmp_path / "model")
    with torch.no_grad():
        base.model.layers[1].self_attn.k_proj.weight[-1] = 0
    base.save_pretrained(tmp_path / "model")

    def zero(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "layers.1.self_attn.k_proj.lora_B" in name:
                parameter[-1] = 0

    dirs = {}
    for name, train in (("faulty", zero), ("sound", lambda model: None)):
        spec = AdapterSpec(name, 4, ["k_proj", "o_proj"], {"use_dora": True})
        adapted(copy.deepcopy(base), "llama", tmp_path / "adapters", [spec], train)
        dirs[name] = tmp_path / "adapters" / name
    zoo = Zoo("llama", tmp_path / "model", base, dirs)
    running = start(zoo, **shape)
    for number in range(2):
        for name in ("faulty", "sound", ""):
            running.submit(f"{name}{number}", [5, 6, 7], name, max_tokens=4)
        error = running.result(f"faulty{number}")[1].error
        assert isinstance(error, AdapterUnusable)
        assert "model.layers.1.self_attn.k_proj becomes zero" in str(error)
        for name in ("sound", ""):
            tokens, last = running.result(f"{name}{number}")
            assert last.error is None
            assert len(tokens) == 4
    running.check_idle()
