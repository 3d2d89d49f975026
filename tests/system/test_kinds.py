"""Every kind of adapter against transformers + peft: the same logits and greedy tokens, alone and
beside each other, on the torch path and the native one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.test_parity import PATHS, RecordingSampler, prompts, relative_rms
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
