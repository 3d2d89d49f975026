"""Encoders embed as transformers and PEFT do, base and adapters mixed in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import peft
import pytest
import torch
import transformers

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.compile import compile_image
from inference_svc.adapters.targets import build_layout
from inference_svc.model.architectures import load_description
from inference_svc.results.embedding_rule import Pooling
from loadout.errors import InvalidArgument
from tests.support.models.encoders import (
    ADAPTERS,
    FAMILIES,
    MAX_TOKENS,
    Encoder,
    config_of,
    make_encoder,
    save_encoder,
    save_modules,
)
from tests.support.models.zoo import Zoo, quiet
from tests.support.store.cards import copied_cards
from tests.system.embedded import embedding, option
from tests.system.services import Services


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Encoder]:
    """Encoders by family, each made once."""
    made: dict[str, Encoder] = {}

    def encoder(family: str) -> Encoder:
        if family not in made:
            made[family] = make_encoder(family, tmp_path_factory.mktemp(family))
        return made[family]

    return encoder


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_batch_tokens": 150, "max_loras": 2}, {"native_kernels": False}],
    ids=["native", "narrow-steps", "torch"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_equals_transformers(
    encoders: Callable[[str], Encoder],
    start: Callable[..., Any],
    family: str,
    settings: dict[str, int],
) -> None:
    """Of the base and adapters, poolings and lengths, also the longest, in one flood."""
    made = encoders(family)
    running = start(made.zoo, max_model_len=MAX_TOKENS, max_sequences=16, **settings)
    rng = np.random.default_rng(3)
    lengths = [1, 2, 9, 9, 9, 64, MAX_TOKENS, 33, 33, 17, 100, 5]
    inputs = [rng.integers(5, 120, length).tolist() for length in lengths]
    names, poolings = ("", *ADAPTERS), list(Pooling)
    asked = {
        f"{index} {adapter}": (ids, adapter, poolings[(index + place) % len(poolings)])
        for index, ids in enumerate(inputs)
        for place, adapter in enumerate(names)
    }
    for name, (ids, adapter, pooling) in asked.items():
        running.submit(name, ids, adapter, max_tokens=0, embedding=option(pooling))
    for name, (ids, adapter, pooling) in asked.items():
        found = embedding(running, name, option(pooling))
        np.testing.assert_allclose(found, made.vector(adapter, ids, pooling), atol=1e-4)
    running.check_idle()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("services")
    made = make_encoder("bert", folder)
    save_modules(made.folder, pooling="cls_token", normalises=True, query="find: ")
    flags = ("--base-model", "bert", "--max-model-len", str(MAX_TOKENS), "--http", "127.0.0.1:0")
    with Services(made.zoo, folder, inference_flags=flags) as running:
        for name in ADAPTERS:
            running.client.register(name, str(made.adapter_dirs[name]))
        yield running
        running.check_exit_codes()


def test_a_folder_of_sentence_transformers_is_served(services: Services) -> None:
    """Over gRPC and HTTP, as its files say: the first token, normalised, behind a prompt."""
    client, zoo = services.client, services.zoo
    made = Encoder(zoo.model_dir, zoo.reference, zoo.adapter_dirs)
    for prompt_name, prompt in (("", ""), ("query", "find: ")):
        ids = list(client.tokenize(f"{prompt}a b c"))
        for adapter in ("", *ADAPTERS):
            [found] = client.embed("a b c", adapter=adapter, prompt_name=prompt_name)
            vector = made.vector(adapter, ids, Pooling.FIRST)
            np.testing.assert_allclose(np.asarray(found.vector), vector, atol=1e-4)
    body: dict[str, Any] = {"model": "wide", "input": ["a b c", "d e f g"]}
    answer = httpx2.post(f"http://{services.http_address}/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    for found, text in zip(answer.json()["data"], body["input"], strict=True):
        vector = made.vector("wide", list(client.tokenize(text)), Pooling.FIRST)
        np.testing.assert_allclose(np.asarray(found["embedding"]), vector, atol=1e-4)


def test_a_server_of_an_encoder_sleeps_and_reports(services: Services) -> None:
    """Its state has no bytes; the memory of its weights goes and comes back."""
    client, ids = services.client, [[7, 8, 9]]
    before = np.asarray(client.embed(ids, adapter="every")[0].vector)
    lines = {each.name: each.capacity_bytes for each in client.server_info().memory}
    assert lines["kv_pages"] == 0, lines
    assert client.sleep(weights=True) > 0
    client.wake()
    after = np.asarray(client.embed(ids, adapter="every")[0].vector)
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_an_encoder_does_not_generate(services: Services) -> None:
    with pytest.raises(InvalidArgument, match="has no head, and does not generate: it embeds"):
        services.client.complete("a", max_tokens=1)
    with pytest.raises(InvalidArgument, match="does not score: it has no classification head"):
        services.client.score("a", ["b"])


def test_an_input_that_is_too_long_is_refused(services: Services) -> None:
    with pytest.raises(InvalidArgument) as caught:
        services.client.embed([[5], [5] * (MAX_TOKENS + 1)])
    assert caught.value.subject == "inputs[1]"


def test_where_memory_is_short_fewer_prompts_are_computed_at_once(
    encoders: Callable[[str], Encoder], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is cut; one that never fits ends alone."""
    made = encoders("bert")
    running = start(made.zoo, max_model_len=MAX_TOKENS, native_kernels=False)
    transformer = running.engine.built.engine.runner.backend.transformer
    layers, sizes = transformer.layers, list[int]()

    def scarce(inputs: Any, *others: Any) -> Any:
        if len(inputs.token_ids) > 50:
            raise torch.OutOfMemoryError("out of memory")
        sizes.append(len(inputs.token_ids))
        return layers(inputs, *others)

    monkeypatch.setattr(transformer, "layers", scarce)
    inputs = {str(length): list(range(5, 5 + length)) for length in (30, 20, 31, 60, 7, 40)}
    asked = option(Pooling.MEAN)
    for name, ids in inputs.items():
        running.submit(name, ids, "every", max_tokens=0, embedding=asked)
    for name, ids in inputs.items():
        if name == "60":
            assert running.result(name)[1].error is not None
            continue
        found = embedding(running, name, asked)
        np.testing.assert_allclose(found, made.vector("every", ids, Pooling.MEAN), atol=1e-4)
    assert sum(sizes) == sum(len(ids) for ids in inputs.values()) - 60
    running.check_idle()


CHANGES: dict[str, dict[str, Any]] = {
    "all-biases": {"bias": "all"},
    "own-biases": {"bias": "lora_only"},
    "norms": {"modules_to_save": ["LayerNorm"]},
    "plain": {},
}
"""Adapters that train more than A and B."""


def make_changed(family: str, folder: Path) -> tuple[Zoo, dict[str, Encoder]]:
    """A model, and an oracle of each of its adapters, whose trained values are random."""
    save_encoder(family, folder / "model", "Model")
    load = getattr(transformers, f"{FAMILIES[family][0]}Model").from_pretrained
    is_modern = family.startswith("modernbert")
    extra = {} if is_modern else {"add_pooling_layer": False}
    made, dirs = {}, {}
    for seed, (name, options) in enumerate(CHANGES.items()):
        if is_modern and "bias" in options:
            continue  # fused projections have no biases of their own, which is refused by name
        torch.manual_seed(30 + seed)
        if is_modern and "modules_to_save" in options:
            options = {"modules_to_save": ["attn_norm", "mlp_norm", "final_norm"]}
        targets = ["Wqkv", "Wi"] if is_modern else ["query", "output.dense"]
        config = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False, **options)
        with quiet(), copied_cards():
            adapted = peft.get_peft_model(load(folder / "model", **extra), config, name).eval()
            for key, parameter in adapted.named_parameters():
                if parameter.requires_grad and "lora_" not in key:
                    parameter.data += 0.3 * torch.randn(parameter.shape)
            adapted.save_pretrained(folder / "adapters", save_embedding_layers=False)
        dirs[name] = folder / "adapters" / name
        made[name] = Encoder(folder / "model", adapted, dirs)
    return Zoo("encoder", folder / "model", None, dirs), made


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_biases_and_norms_of_adapters_equal_peft(
    start: Callable[..., Any], family: str, tmp_path: Path, *, native: bool
) -> None:
    """Rows of each adapter, and of the base, in one flood."""
    zoo, made = make_changed(family, tmp_path)
    running = start(zoo, max_model_len=MAX_TOKENS, max_sequences=16, native_kernels=native)
    rng = np.random.default_rng(3)
    asked = {
        f"{name} {length}": (name, rng.integers(5, 120, length).tolist())
        for length in (1, 9, 64, 33)
        for name in ("", *made)
    }
    pooling = Pooling.NONE
    for key, (name, ids) in asked.items():
        running.submit(key, ids, name, max_tokens=0, embedding=option(pooling))
    for key, (name, ids) in asked.items():
        found = embedding(running, key, option(pooling))
        wanted = made[name or "plain"].vector(name, ids, pooling)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    running.check_idle()


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"target_modules": ["dense"]}, "pooler"),
        ({"target_modules": ["query", "position_embeddings"]}, "position_embeddings"),
        ({"target_modules": ["query"], "bias": "all"}, "pooler.dense.bias"),
        ({"target_modules": ["query"], "modules_to_save": ["pooler"]}, "pooler"),
    ],
)
def test_other_modules_are_refused_by_name(
    options: dict[str, Any], culprit: str, tmp_path: Path
) -> None:
    """By the store, which plans no image."""
    model = transformers.BertModel(config_of("bert"))
    save_encoder("bert", tmp_path / "model", "Model")
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
    with quiet(), copied_cards():
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    layout = build_layout(load_description(tmp_path / "model"), "", torch.float32)
    announced, _ = layout.announced(2)
    checkpoint = open_checkpoint(tmp_path / "adapter")
    with pytest.raises(IncompatibleAdapter, match=culprit):
        compile_image(checkpoint, announced)
