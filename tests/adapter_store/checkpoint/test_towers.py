"""Modules of other towers are known by where they are, and what is said of them can be used."""

from __future__ import annotations

import re

import pytest

from adapter_store.checkpoint.peft.tensor_keys import parse_key
from adapter_store.checkpoint.peft.towers import advice, describe_unknown, tower_of
from adapter_store.errors import InvalidAdapter


@pytest.mark.parametrize(
    ("module", "tower"),
    [
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj", "vision_tower"),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", "vision_tower"),
        ("model.multi_modal_projector.linear_1", "multi_modal_projector"),
        ("model.connector.modality_projection.proj", "connector"),
        ("model.audio_tower.layers.0.lconv1d.linear_end.linear", "audio_tower"),
        ("model.language_model.layers.0.self_attn.q_proj", ""),
        ("model.layers.0.self_attn.q_proj", ""),
        ("model.layers.0.vision_tower.q_proj", ""),
        ("lm_head", ""),
    ],
)
def test_where_a_module_is(module: str, tower: str) -> None:
    assert tower_of(module) == tower


TEXT = (
    "model.language_model.embed_tokens",
    "model.language_model.layers.3.self_attn.q_proj",
    "language_model.model.layers.3.self_attn.q_proj",
    "model.language_model.layers.3.mlp.down_proj",
    "lm_head",
    "language_model.lm_head",
)
OTHERS = (
    "model.vision_tower.encoder.layers.3.self_attn.q_proj",
    "vision_tower.transformer.layers.3.attention.q_proj",
    "model.multi_modal_projector.linear_1",
)


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        ((), {TEXT[1], TEXT[2], TEXT[3]}),
        (("q_proj", "q_proj"), {TEXT[1], TEXT[2]}),
        (("embed_tokens", "lm_head"), {TEXT[0], TEXT[4], TEXT[5]}),
        (("lm_head",), {TEXT[4], TEXT[5]}),
    ],
)
def test_the_expression_means_the_language_model_alone(
    names: tuple[str, ...], meant: set[str]
) -> None:
    """PEFT matches the whole path of a module."""
    said = advice(["vision_tower"], iter(names))
    found = re.search(r'target_modules=r"(.+?)",', said)
    assert found is not None
    assert {path for path in (*TEXT, *OTHERS) if re.fullmatch(found[1], path)} == meant


CONVOLUTION = "model.vision_tower.embeddings.patch_embedding"


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (TEXT, "only the language model is served, without vision_tower"),
        ((*TEXT, *OTHERS), "of vision_tower adapters may change linear layers"),
    ],
)
def test_advice_depends_on_the_parts_that_a_server_computes(
    targets: tuple[str, ...], words: str
) -> None:
    said = describe_unknown([CONVOLUTION], ["q_proj"], targets)
    assert said.startswith(f"has no {CONVOLUTION}: {words}")


def test_a_parameter_of_a_saved_projector() -> None:
    """Gemma 3's has no module of its own, and so no name that ends as a weight's does."""
    key = "base_model.model.model.multi_modal_projector.mm_input_projection_weight"
    with pytest.raises(InvalidAdapter, match="of multi_modal_projector adapters may") as said:
        parse_key(key)
    assert (said.value.subject, said.value.reason) == (key, "TENSOR_UNKNOWN")
