"""Adapters of models of several towers, trained on the whole model or on its text part alone: what
the text part computes with them is what transformers and PEFT compute. What changes linear layers
of another tower has no effect, which the verdict says; what else it may change there is refused,
with how to train it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from loadout import errors
from loadout.cli.__main__ import main
from tests.support.models.parity import RecordingSampler, prompts, relative_rms
from tests.support.models.trained import renamed
from tests.support.models.whole_models import WHOLE, whole_class, whole_config
from tests.support.models.zoo import (
    VOCAB,
    AdapterSpec,
    Zoo,
    adapted,
    save_tokenizer,
    shake_norms_and_biases,
)
from tests.support.pairs import PATHS
from tests.system.services import Services

TEXT = {
    "vocab_size": VOCAB + 8,  # beyond the tokenizer's are those of images
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
}
LINEAR = r".*language_model\..*\.(q|k|v|o|gate|up|down)_proj"
SPECS = (
    AdapterSpec("attention", 8, r".*language_model\..*self_attn\.[qkvo]_proj"),
    AdapterSpec("linear", 5, LINEAR, {"use_rslora": True, "rank_pattern": {"k_proj": 3}}),
    AdapterSpec("older", 4, LINEAR),
    AdapterSpec("ends", 4, r".*embed_tokens|(.*\.)?lm_head|.*language_model\..*o_proj"),
)
ALONE = AdapterSpec("alone", 6, ["q_proj", "v_proj", "down_proj"])
TEXT_CLASSES = {"Gemma3": "Gemma3", "Gemma4": "Gemma4", "Mistral3": "Mistral"}
QWEN = ("Qwen3_5", "Qwen3_5Moe")
"""Models whose vision tower names its layers otherwise."""
NUM_TOKENS = 8
PROMPT = [ord(char) for char in "the quick brown fox"]


@dataclass
class Whole:
    """A whole model with its adapters, and its text part alone with those that were made on it;
    `zoo` has all of them on disk."""

    zoo: Zoo
    alone: Zoo

    def oracle(self, adapter: str) -> Zoo:
        return self.alone if adapter in self.alone.adapter_dirs else self.zoo


@pytest.fixture(scope="module", params=WHOLE)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Of the whole model's adapters one is named as transformers did before its release 5."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    model = make_model(name)
    text = text_alone(name, model)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    made, dirs = folder / "adapters", {}
    zoo = Zoo(name, folder / "model", adapted(model, name, made, SPECS), dirs)
    alone = Zoo(name, folder / "model", adapted(text, name, made, [ALONE]), {})
    alone.adapter_dirs[ALONE.name] = made / ALONE.name
    dirs |= {spec.name: made / spec.name for spec in (*SPECS, ALONE)}
    older = made / "as before release 5"
    dirs["older"] = renamed(made / "older", older, "model.language_model.", "language_model.model.")
    return Whole(zoo, alone)


def make_model(name: str) -> Any:
    torch.manual_seed(7)
    more = {"vocab_size_per_layer_input": TEXT["vocab_size"]} if name == "Gemma4" else {}
    config = whole_config(name, TEXT | more)
    for number, key in enumerate(key for key in vars(config) if key.endswith("_token_index")):
        setattr(config, key, VOCAB + number)
    for number, key in enumerate(("image_token_id", "video_token_id", "audio_token_id")):
        if getattr(config, key, None) is not None:
            setattr(config, key, VOCAB + 4 + number)
    model = whole_class(name)._from_config(config, dtype=torch.float32).eval()
    shake_norms_and_biases(model)
    model.generation_config.eos_token_id = 2
    model.name_or_path = model.config.name_or_path = name
    return model


def text_alone(name: str, model: Any) -> Any:
    """Returns a copy of the text part as a model of its own."""
    kind = TEXT_CLASSES.get(name, name)
    alone = getattr(transformers, f"{kind}ForCausalLM")(model.config.text_config).eval()
    alone.model.load_state_dict(model.model.language_model.state_dict())
    alone.lm_head.load_state_dict(model.lm_head.state_dict())
    alone.generation_config.eos_token_id = 2
    alone.name_or_path = alone.config.name_or_path = name
    return alone


@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_logits_are_those_of_peft(whole: Whole, path: str, start: Callable) -> None:
    running = start(whole.zoo, native_kernels=PATHS[path], max_model_len=512)
    recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
    running.engine.built.engine.runner.sampler = recorder
    adapters = ["", *running.digests]
    asked = prompts(len(adapters))
    for name, prompt in zip(adapters, asked, strict=True):
        running.submit(name or "base", prompt, name, max_tokens=NUM_TOKENS)
    results = [running.result(name or "base") for name in adapters]
    base = None
    for name, prompt, (tokens, last) in zip(adapters, asked, results, strict=True):
        assert last.error is None
        given, start_of_answer = prompt + tokens[:-1], len(prompt) - 1
        oracle = whole.oracle(name)
        expected = oracle.logits(name, given, torch.float32)[start_of_answer:]
        got = torch.stack(recorder.logits[name or "base"])
        assert relative_rms(got, expected) <= 1e-4, name
        base = oracle.logits("", given, torch.float32)[start_of_answer:]
        assert not name or relative_rms(got, base) > 1e-3, name
    running.check_idle()


@pytest.fixture(scope="module")
def services(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    flags = ("--aliases", whole.zoo.kind, "--max-prompt-images", "0")
    with Services(whole.zoo, tmp_path_factory.mktemp("services"), (), flags) as made:
        yield made
        made.check_exit_codes()


def answer(services: Services, name: str, source: str) -> list[int]:
    revision = services.client.register(name, source).revision
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    done = services.client.complete(PROMPT, adapter=name, min_revision=revision, **options)
    return list(done.token_ids)


@pytest.mark.processes
def test_services_answer_as_peft(whole: Whole, services: Services) -> None:
    for name in whole.zoo.adapter_dirs:
        got = answer(services, name, services.source(name))
        assert got == whole.oracle(name).greedy(name, PROMPT, NUM_TOKENS, guess=got), name


@pytest.mark.processes
def test_what_another_towers_modules_change_has_no_effect_and_the_verdict_says_so(
    whole: Whole, services: Services, capfd: pytest.CaptureFixture[str]
) -> None:
    """A list of names means the vision tower's, too, and so do all linear layers, which PEFT has in
    place of the list for Gemma 4."""
    kind = whole.zoo.kind
    own = ["linear_fc1"] if kind in QWEN else []
    targets = "all-linear" if kind == "Gemma4" else ["q_proj", "v_proj", *own]
    spec = AdapterSpec("both", 4, targets)
    oracle = Zoo(kind, Path(), adapted(make_model(kind), kind, services.sources, [spec]), {})
    source = f"file://{services.sources / 'both'}"
    got = answer(services, "both", source)
    assert got == oracle.greedy("both", PROMPT, NUM_TOKENS, guess=got)
    assert got != oracle.greedy("", PROMPT, NUM_TOKENS)
    capfd.readouterr()
    assert main(["register", "both", source, "--store", services.store_address]) == 0
    tower = "visual" if kind in QWEN else "vision_tower"
    said = rf"servable by .*, except its changes in .*{tower}, which no request passes"
    assert re.search(said, capfd.readouterr().out)


@pytest.mark.processes
def test_a_convolution_is_refused_and_what_is_said_helps(whole: Whole, services: Services) -> None:
    """Without the layer that the error names it is served."""
    kind = whole.zoo.kind
    names = {"Gemma3": "patch_embedding", "Gemma4": "conv"}
    conv = "patch_embed.proj" if kind in QWEN else names.get(kind, "patch_conv")
    text = r".*language_model\..*q_proj"
    config = peft.LoraConfig(r=2, target_modules=rf"{text}|.*\.{conv}")
    folder = services.sources / conv
    made = peft.get_peft_model(make_model(kind), config)
    made.save_pretrained(folder, save_embedding_layers=False)
    said = rf"convolutions are not supported, train without {conv.rpartition('.')[2]} in target_m"
    with pytest.raises(errors.InvalidArgument, match=said):
        services.client.register("conv", f"file://{folder}")
    shutil.rmtree(folder)
    spec = AdapterSpec("limited", 2, text)
    oracle = Zoo(kind, Path(), adapted(make_model(kind), kind, services.sources, [spec]), {})
    got = answer(services, "limited", f"file://{services.sources / 'limited'}")
    assert got == oracle.greedy("limited", PROMPT, NUM_TOKENS, guess=got)
    assert got != oracle.greedy("", PROMPT, NUM_TOKENS)
