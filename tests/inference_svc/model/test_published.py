"""Configs with what the authors of published models left in them are read as transformers reads
them. They are made after public copies, key by key; lists of factors have other numbers."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from inference_svc.model.architectures import families, load_description
from inference_svc.model.checkpoint.parameters import parameters
from inference_svc.model.description import Decoder

pytestmark = pytest.mark.matrix

PUBLISHED = {path.stem: path for path in sorted((Path(__file__).parent / "published").iterdir())}


def described(values: dict, folder: Path) -> Decoder:
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return load_description(folder)


@pytest.fixture
def values(name: str) -> dict:
    return json.loads(PUBLISHED[name].read_text())


@pytest.fixture
def config(values: dict) -> transformers.PreTrainedConfig:
    return CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_and_layers(name, values, config, tmp_path):
    decoder = described(values, tmp_path)
    architecture = getattr(transformers, values["architectures"][0])
    with torch.device("meta"):
        model = architecture._from_config(config)
    stored = {
        decoder.wrapper.text_name(name): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
    }
    stored.pop(None, None)  # of other towers
    forms = [each.form(stored) for each in parameters(decoder)]
    expected = {key: piece.shape for form in forms for key, piece in form.items()}
    heads = {"lm_head.weight"} if decoder.head.is_tied else set()
    assert {key: stored[key] for key in stored.keys() - heads} == expected
    assert decoder.head.is_tied == config.tie_word_embeddings
    parts = (getattr(model.model, each, None) for each in ("language_model", "text_model"))
    text = next(filter(None, parts), model.model)
    attentions = [each.self_attn for each in text.layers if hasattr(each, "self_attn")]
    for theirs, ours in zip(attentions, decoder.attentions, strict=True):
        assert ours.scale == pytest.approx(theirs.scaling, rel=1e-6)
        has_window = getattr(theirs, "is_sliding", True)
        config_window = getattr(theirs.config, "sliding_window", None)
        window = getattr(theirs, "sliding_window", config_window) if has_window else None
        assert ours.window == (window or None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies(name, values, config, tmp_path):
    decoder = described(values, tmp_path)
    text = config.get_text_config()
    module = importlib.import_module(type(text).__module__.replace("configuration", "modeling"))
    rotary = next(
        kind
        for name, kind in vars(module).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    )
    theirs = dict(rotary(text).named_buffers())
    assert decoder.ropes
    for rope, head_dim in decoder.ropes:
        ours = rope.inverse_frequencies(head_dim)
        alike = [each for each in theirs.values() if each.shape == ours.shape]
        assert any(torch.allclose(ours, each, rtol=1e-5, atol=0) for each in alike)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_says_the_same(name, values, config, tmp_path):
    """As it writes the config anew."""
    written = config.to_diff_dict() | {"architectures": values["architectures"]}
    first, again = (
        replace(described(each, tmp_path), config_sha256="", dtype="") for each in (values, written)
    )
    assert again == first


QWEN_3_5 = "qwen3.6-27b", "qwen3.6-35b-a3b"
QWEN = ("qwen2-vl-7b", "qwen2.5-vl-7b", "qwen3-vl-4b", "qwen3-vl-30b-a3b", *QWEN_3_5)
SIDES = {
    "gemma-3-27b": 896,
    "gemma-3-4b": 896,
    "gemma-4-26b-a4b": 0,
    "gemma-4-e2b": 0,
    "idefics3-8b": 364,
    "llava-1.5-7b": 336,
    "ministral-3-3b": 0,
    "mistral-small-3.1-24b": 0,
    "smolvlm2-500m": 512,
} | dict.fromkeys(QWEN, 0)
"""The sides of the tiles of models that read pictures; 0: they have any size."""
QWEN_BEFORE_3 = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}
QWEN_3 = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16}
_GEMMA3 = {
    "size": {"height": 896, "width": 896},
    "image_processor_type": "Gemma3ImageProcessor",
    "do_pan_and_scan": None,
    "resample": 2,
}
_GEMMA4 = {
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_seq_length": 280,
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
}
_PIXTRAL = {
    "size": {"longest_edge": 1540},
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 14,
}
PROCESSORS = {
    "ministral-3-3b": _PIXTRAL,
    "mistral-small-3.1-24b": _PIXTRAL,
    "gemma-3-27b": _GEMMA3,
    "gemma-3-4b": _GEMMA3,
    "gemma-4-26b-a4b": _GEMMA4,
    "gemma-4-e2b": _GEMMA4,
    "idefics3-8b": {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}},
    "llava-1.5-7b": {
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
        "image_processor_type": "CLIPImageProcessor",
    },
    "smolvlm2-500m": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    **dict.fromkeys(QWEN[:2], QWEN_BEFORE_3),
    **dict.fromkeys(QWEN[2:], QWEN_3),
}


@pytest.mark.parametrize("name", SIDES)
def test_towers(name, values, config, tmp_path):
    kind = "Qwen2VLImageProcessorFast" if name in QWEN else "Idefics3ImageProcessor"
    processor = {"image_processor_type": kind} | PROCESSORS[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "config.json").write_text(json.dumps(values))
    pictures = load_description(tmp_path, with_pictures=True).pictures
    assert pictures is not None
    tower = pictures.tower
    assert pictures.tiles.tile_size == SIDES[name]
    with torch.device("meta"):
        model = getattr(transformers, values["architectures"][0])._from_config(config)
    stored = {
        tower.wrapper.text_name(name): tuple(tensor.shape) or (1,)
        for name, tensor in model.state_dict().items()
    }
    stored.pop(None, None)  # of the language part
    unused = tuple(tower.encoder.unused)
    first = len(tower.blocks)
    skipped = tuple(f"model.layers.{first + n}." for n in range(tower.num_unused_layers))
    forms = [each.form(stored) for each in parameters(tower)]
    expected = {key: piece.shape for form in forms for key, piece in form.items()}
    assert expected == {
        key: shape for key, shape in stored.items() if not key.startswith((*unused, *skipped))
    }


def test_every_family_has_one():
    """But for those whose files hold nothing that was not read before."""
    found = {json.loads(path.read_text())["architectures"][0] for path in PUBLISHED.values()}
    assert found >= families().keys() - {
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *("Olmo2ForCausalLM", "Ministral3ForCausalLM", "Gemma4ForCausalLM"),
        *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    }
