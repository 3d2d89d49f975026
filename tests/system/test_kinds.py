"""Every kind of adapter against transformers + peft: the same logits and greedy tokens, alone and
beside each other, on the torch path and the native one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.parity import prompts, relative_rms
from tests.support.models.trained import WEIGHTS, edited
from tests.support.models.zoo import ALL, AdapterSpec, Zoo, adapted, make_model, quiet
from tests.support.pairs import PATHS
from tests.system.engines import Running
from tests.system.kinds import ALORA, ROWS, Kinds, begin, check, make_kinds, shake

KINDS = ("qwen3", "gemma2", "cohere2")
"""Norms of queries and keys, and biases; norms behind and caps; LayerNorms, a tied head."""

lengths = pytest.mark.parametrize("num_tokens", [16, pytest.param(64, marks=pytest.mark.long)])
"""Of answers."""


@pytest.fixture(scope="module", params=KINDS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(request.param, tmp_path_factory.mktemp(request.param))


@lengths
@pytest.mark.parametrize("path", PATHS)
def test_all_kinds_together_have_the_oracles_logits(
    zoo: Kinds, path: str, num_tokens: int, start: Callable
) -> None:
    """With the base model twice, and a sum."""
    running, recorder = begin(zoo, start, native_kernels=PATHS[path])
    names = [*zoo.names, ""]
    asked = [zoo.prompt_of(*each) for each in zip(names, prompts(len(names)), strict=True)]
    for index, (name, prompt) in enumerate(zip(names, asked, strict=True)):
        zoo.submit(running, str(index), prompt, name, max_tokens=num_tokens)
    results = [running.result(str(index)) for index in range(len(names))]
    for index, (name, prompt) in enumerate(zip(names, asked, strict=True)):
        check(zoo, name, prompt, *results[index], recorder.logits[str(index)])
    running.check_idle()


@lengths
@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_each_kind_alone_has_the_oracles_logits(
    zoo: Kinds, path: str, num_tokens: int, start: Callable
) -> None:
    """Steps of one adapter take other ways than mixed ones."""
    running, recorder = begin(zoo, start, native_kernels=PATHS[path])
    for name, tokens in zip(zoo.names, prompts(len(zoo.names), seed=1), strict=True):
        prompt = zoo.prompt_of(name, tokens)
        zoo.submit(running, name or "base", prompt, name, max_tokens=num_tokens)
        check(zoo, name, prompt, *running.result(name or "base"), recorder.logits[name or "base"])
    running.check_idle()


def test_magnitudes_of_rows_of_zeros_are_refused_by_name(tmp_path: Path, start: Callable) -> None:
    """They cannot be divided by the norm of what they scale. Others are not disturbed."""
    base = make_model("qwen3", tmp_path / "model")
    with torch.no_grad():
        base.model.layers[1].self_attn.k_proj.weight[5] = 0
    base.save_pretrained(tmp_path / "model")

    def zero(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "layers.1.self_attn.k_proj.lora_B" in name:
                parameter[5] = 0

    dirs = {}
    for name, train in (("faulty", zero), ("sound", lambda model: None)):
        spec = AdapterSpec(name, 4, ["k_proj", "o_proj"], {"use_dora": True})
        adapted(copy.deepcopy(base), "qwen3", tmp_path / "adapters", [spec], train)
        dirs[name] = tmp_path / "adapters" / name
    running = start(Zoo("qwen3", tmp_path / "model", base, dirs))
    for number in range(2):
        for name in ("faulty", "sound", ""):
            running.submit(f"{name}{number}", [5, 6, 7], name, max_tokens=4)
    for number in range(2):
        _, last = running.result(f"faulty{number}")
        assert last.error is not None
        assert "model.layers.1.self_attn.k_proj" in last.error.message
        for name in ("sound", ""):
            tokens, last = running.result(f"{name}{number}")
            assert last.error is None
            assert len(tokens) == 4
    running.check_idle()
    engine = running.engine.built.engine
    num_refused = engine.losses.num_not_finite(running.digests["faulty"])
    assert num_refused == engine.losses.num_refused > 0
    assert engine.losses.num_not_finite(running.digests["sound"]) == 0
    assert engine.commands.describe().counters["not_finite_requests"] == num_refused


@dataclass(frozen=True)
class Whole:
    """What an adapter can have at once. `parts` are the names of the tensors of each, and what the
    config says without it."""

    options: dict[str, Any]
    parts: dict[str, tuple[str, dict[str, Any]]]


MODULES = ["embed_tokens", "lm_head", "norm"]
WHOLES = {
    "DoRA": Whole(
        {
            "use_dora": True,
            "modules_to_save": ["lm_head", "norm"],
            "trainable_token_indices": ROWS,
            "bias": "lora_only",
        },
        {
            "magnitude": ("lora_magnitude_vector", {"use_dora": False}),
            "head": ("lm_head", {"modules_to_save": ["norm"]}),
            "norms": ("norm.weight", {"modules_to_save": ["lm_head"]}),
            "rows": ("trainable_tokens_delta", {"trainable_token_indices": None}),
            "biases": (".bias", {"bias": "none"}),
        },
    ),
    "biases of B": Whole(
        {"lora_bias": True, "modules_to_save": MODULES},
        {
            "bias of B": ("lora_B.bias", {"lora_bias": False}),
            "embedding": ("embed_tokens", {"modules_to_save": ["lm_head", "norm"]}),
            "head": ("lm_head", {"modules_to_save": ["embed_tokens", "norm"]}),
            "norms": ("norm.weight", {"modules_to_save": ["embed_tokens", "lm_head"]}),
        },
    ),
}
"""PEFT has no biases of B with DoRA, and no rows of an embedding that is saved."""


@pytest.mark.parametrize("which", WHOLES)
def test_each_kind_that_is_taken_away_changes_the_logits(
    tmp_path: Path, start: Callable, which: str
) -> None:
    """Else the parity above could hold for kinds that do nothing."""
    expected = WHOLES[which]
    base = make_model("qwen3", tmp_path / "model")
    spec = AdapterSpec("all", 4, ALL, expected.options)
    whole = adapted(copy.deepcopy(base), "qwen3", tmp_path / "adapters", [spec], shake)
    dirs = {"all": tmp_path / "adapters" / "all"}
    for name, (part, changes) in expected.parts.items():
        dirs[name] = tmp_path / "adapters" / f"without {name}"
        shutil.copytree(dirs["all"], dirs[name])
        edited(dirs[name], **changes)
        tensors = load_file(dirs["all"] / WEIGHTS)
        kept = {key: value for key, value in tensors.items() if part not in key}
        assert len(kept) < len(tensors), name
        save_file(kept, dirs[name] / WEIGHTS)
    zoo = Zoo("qwen3", tmp_path / "model", whole, dirs)
    running, recorder = begin(zoo, start)
    prompt = [7, 3, 50, 9]
    for name in dirs:
        running.submit(name, prompt, name, max_tokens=1)
        assert running.result(name)[1].error is None, name
    logits = {name: recorder.logits[name][0] for name in dirs}
    oracle = zoo.logits("all", prompt, torch.float32)[-1]
    assert relative_rms(logits["all"], oracle) < 1e-4
    for name in expected.parts:
        assert relative_rms(logits[name], logits["all"]) > 0.01, name


def test_invocation_tokens_change_the_logits(zoo: Kinds, start: Callable) -> None:
    """The same weights over the whole prompt are another adapter."""
    running, recorder = begin(zoo, start)
    prompt = zoo.prompt_of(ALORA, prompts(2)[1])
    zoo.submit(running, "invoked", prompt, ALORA, max_tokens=1)
    running.submit("whole", prompt, ALORA, max_tokens=1)
    running.result("invoked"), running.result("whole")
    invoked, whole = (recorder.logits[name][0] for name in ("invoked", "whole"))
    assert relative_rms(invoked, whole) > 0.01


@lengths
@pytest.mark.parametrize("path", PATHS)
def test_dora_has_the_logits_of_merged_weights(
    zoo: Kinds, path: str, num_tokens: int, start: Callable
) -> None:
    running, recorder = begin(zoo, start, native_kernels=PATHS[path])
    prompt = prompts(2)[1]
    for name in ("dora", "dora and the head"):
        tokens = greedy(running, name, prompt, num_tokens)
        with torch.no_grad(), quiet():
            merged = copy.deepcopy(zoo.references[name]).merge_and_unload()
            expected = merged(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert relative_rms(torch.stack(recorder.logits[name]), expected) < 1e-4, name


def greedy(running: Running, name: str, prompt: list[int], num_tokens: int) -> list[int]:
    running.submit(name, prompt, name, max_tokens=num_tokens)
    tokens, last = running.result(name)
    assert last.error is None, last.error
    return tokens
