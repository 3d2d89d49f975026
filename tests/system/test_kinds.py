"""Every kind of adapter against transformers + peft: the same logits and greedy tokens, alone and
beside each other, on the torch path and the native one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.system.test_parity import PATHS, RecordingSampler, prompts, relative_rms
from tests.system.trained import WEIGHTS, edited
from tests.system.zoo import ALL, AdapterSpec, Zoo, adapted, make_model

EVERY_NORM = ["norm"]
"""PEFT saves what ends with it: norms of layers, of queries and keys, and the last one."""
ROWS = [0, 3, 50, 127]
SPECS = (
    AdapterSpec("plain", 8, ALL),
    AdapterSpec("lora_bias", 4, ALL, {"lora_bias": True}),
    AdapterSpec("norms", 4, ["q_proj"], {"modules_to_save": EVERY_NORM}),
    AdapterSpec("head", 4, ["down_proj"], {"modules_to_save": ["lm_head"]}),
    AdapterSpec("embedding", 4, ["v_proj"], {"modules_to_save": ["embed_tokens"]}),
    AdapterSpec("rows", 4, ["v_proj"], {"trainable_token_indices": ROWS}),
    AdapterSpec(
        "rows of both",
        *(3, ["o_proj"]),
        {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": [1, 77]}},
    ),
    AdapterSpec("dora", 6, ALL, {"use_dora": True}),
    AdapterSpec("dora of both ends", 4, ["embed_tokens", "o_proj"], {"use_dora": True}),
    AdapterSpec("dora and the head", 4, ALL, {"use_dora": True, "modules_to_save": ["lm_head"]}),
    AdapterSpec(
        "everything",
        *(5, ALL),
        {"lora_bias": True, "modules_to_save": ["norm", "lm_head", "embed_tokens"]},
    ),
)
BIASES = ("lora_only", "all")
KINDS = ("qwen3", "gemma2", "cohere2")
"""Norms of queries and keys, and biases; norms behind and caps; LayerNorms, a tied head."""


def shake(model: Any) -> None:
    """Gives what trainers train besides A and B values of its own."""
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter += torch.randn_like(parameter) * 0.15
        elif "trainable_tokens_delta" in name:
            parameter += torch.randn_like(parameter) * 0.3
        elif "lora_magnitude" in name:
            parameter *= 1 + 0.2 * torch.rand_like(parameter)
        elif name.endswith(".bias") and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)


@dataclass
class Kinds(Zoo):
    """A model of its own for each adapter: what they have besides A and B, PEFT shares."""

    references: dict[str, Any]

    def of(self, adapter: str) -> Zoo:
        return replace(self, reference=self.references[adapter or SPECS[0].name])


def make_kinds(kind: str, folder: Path) -> Kinds:
    base, references, dirs = make_model(kind, folder / "model"), {}, {}
    specs = [each for each in SPECS if kind == "qwen3" or each.name != "rows of both"]
    for bias in BIASES if kind == "qwen3" else ():
        specs.append(AdapterSpec(f"bias={bias}", 4, ["q_proj", "down_proj"], {"bias": bias}))
    for spec in specs:
        made = folder / "adapters" / spec.name.replace("/", " ")
        references[spec.name] = adapted(copy.deepcopy(base), kind, made, [spec], shake)
        dirs[spec.name] = made / spec.name
    return Kinds(kind, folder / "model", base, dirs, references)


@pytest.fixture(scope="module", params=KINDS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("path", PATHS)
def test_all_kinds_together_have_the_oracles_logits(zoo: Kinds, path: str, start: Callable) -> None:
    running = start(zoo, native_kernels=PATHS[path], max_model_len=512)
    recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
    running.engine.built.engine.runner._sampler = recorder
    adapters = ["", *running.digests, ""]
    asked = prompts(len(adapters))
    for index, (name, prompt) in enumerate(zip(adapters, asked, strict=True)):
        running.submit(str(index), prompt, name, max_tokens=64)
    results = [running.result(str(index)) for index in range(len(adapters))]
    for index, (name, prompt) in enumerate(zip(adapters, asked, strict=True)):
        tokens, last = results[index]
        assert last.error is None
        given, start_of_answer = prompt + tokens[:-1], len(prompt) - 1
        expected = zoo.of(name).logits(name, given, torch.float32)[start_of_answer:]
        got = torch.stack(recorder.logits[str(index)])
        assert relative_rms(got, expected) < 1e-4, name
        assert tokens == zoo.of(name).greedy(name, prompt, 64), name or "base"
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


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "magnitude": ("lora_magnitude_vector", {"use_dora": False}),
    "head": ("lm_head", {"modules_to_save": ["norm"]}),
    "norms": ("norm.weight", {"modules_to_save": ["lm_head"]}),
    "rows": ("trainable_tokens_delta", {"trainable_token_indices": None}),
    "biases": (".bias", {"bias": "none"}),
}
"""What an adapter can have at once: the names of its tensors, and the config without it."""


def test_each_kind_that_is_taken_away_changes_the_logits(tmp_path: Path, start: Callable) -> None:
    """Else the parity above could hold for kinds that do nothing."""
    base = make_model("qwen3", tmp_path / "model")
    options = {
        "use_dora": True,
        "modules_to_save": ["lm_head", "norm"],
        "trainable_token_indices": ROWS,
        "bias": "lora_only",
    }
    spec = AdapterSpec("all", 4, ALL, options)
    whole = adapted(copy.deepcopy(base), "qwen3", tmp_path / "adapters", [spec], shake)
    dirs = {"all": tmp_path / "adapters" / "all"}
    for name, (part, changes) in PARTS.items():
        dirs[name] = tmp_path / "adapters" / f"without {name}"
        shutil.copytree(dirs["all"], dirs[name])
        edited(dirs[name], **changes)
        tensors = load_file(dirs["all"] / WEIGHTS)
        kept = {key: value for key, value in tensors.items() if part not in key}
        assert len(kept) < len(tensors), name
        save_file(kept, dirs[name] / WEIGHTS)
    zoo = Zoo("qwen3", tmp_path / "model", whole, dirs)
    running = start(zoo, native_kernels=True)
    recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
    running.engine.built.engine.runner._sampler = recorder
    prompt = [7, 3, 50, 9]
    for name in dirs:
        running.submit(name, prompt, name, max_tokens=1)
        assert running.result(name)[1].error is None, name
    logits = {name: recorder.logits[name][0] for name in dirs}
    expected = zoo.logits("all", prompt, torch.float32)[-1]
    assert relative_rms(logits["all"], expected) < 1e-4
    for name in PARTS:
        assert relative_rms(logits[name], logits["all"]) > 0.01, name
