"""config.json is read as transformers reads it, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import families, load_description
from inference_svc.model.description import Decoder
from tests.support.models.families import TEXT_PARTS

FAMILIES = [name[: -len("ForCausalLM")] for name in families() if name.endswith("ForCausalLM")]
LLAMA_32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
"""A published file, in the form of transformers 4."""


@pytest.fixture
def model_dir(tmp_path: Path):
    def write(config: dict, generation: dict | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def windows(decoder: Decoder) -> tuple[int | None, ...]:
    return tuple(each.window for each in decoder.attentions)


def test_published_config(model_dir):
    decoder = load_description(model_dir(LLAMA_32))
    attention = decoder.attentions[0]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 64)
    assert (attention.q_size, attention.kv_size) == (2048, 512)
    assert decoder.dtype == "bfloat16"
    assert decoder.eos_token_ids == (128001, 128008, 128009)
    assert attention.rope.rope_type == "llama3"
    assert attention.rope.rope_theta == 500_000
    assert attention.rope.original_max_position_embeddings == 8192
    assert decoder.head.is_tied
    assert windows(decoder) == (None,) * 16


NEEDED = {"Glm4Moe": {"head_dim": 128}}
"""What transformers' own defaults make no model of."""


def config_of(family: str, **values) -> transformers.PreTrainedConfig:
    name = f"{family}TextConfig" if family in TEXT_PARTS else f"{family}Config"
    return getattr(transformers, name)(**NEEDED.get(family, {}), **values)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family, model_dir):
    """A config with nothing in it, and one with everything, as transformers writes it, say the
    same."""
    everything = config_of(family).to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    expected = SimpleNamespace(**everything)
    needed = NEEDED.get(family, {})
    decoder = load_description(model_dir({"architectures": [f"{family}ForCausalLM"], **needed}))
    attention = decoder.attentions[0]
    assert decoder.vocab_size == expected.vocab_size
    assert decoder.hidden_size == expected.hidden_size
    if decoder.max_intermediate_size:
        keys = ("intermediate_size", "shared_expert_intermediate_size")
        sizes = {getattr(expected, key, None) for key in keys}
        sizes = {8192} if family == "Lfm2" else sizes  # 12,288 cut to two thirds
        assert decoder.max_intermediate_size in sizes
    if decoder.mixtures and family != "Gemma4":
        own = getattr(expected, "moe_intermediate_size", None) or expected.intermediate_size
        assert {each.size for each in decoder.mixtures} == {own}
    assert decoder.num_layers == expected.num_hidden_layers
    assert attention.num_heads == expected.num_attention_heads
    num_kv_heads = expected.num_key_value_heads or expected.num_attention_heads
    assert attention.num_kv_heads == num_kv_heads
    derived = expected.hidden_size // expected.num_attention_heads
    assert attention.head_dim == (getattr(expected, "head_dim", None) or derived)
    named = ("rms_norm_eps", "layer_norm_eps", "norm_eps")
    eps = next(getattr(expected, name) for name in named if hasattr(expected, name))
    assert decoder.final_norm.eps == eps
    assert decoder.max_position_embeddings == expected.max_position_embeddings
    assert decoder.head.is_tied == expected.tie_word_embeddings
    written = load_description(model_dir(everything))
    assert replace(written, config_sha256="", dtype="") == replace(
        decoder, config_sha256="", dtype=""
    )


def test_all_keys_that_are_refused_are_named(model_dir):
    config = {"architectures": ["Cohere2ForCausalLM"], "rotary_pct": 0.5, "new": 1, "odd": [2]}
    with pytest.raises(UnsupportedModel) as caught:
        load_description(model_dir(config | {"use_parallel_block": True}))
    assert str(caught.value) == (
        "config.json: rotary_pct = 0.5: Cohere2ForCausalLM is computed with 1.0; new = 1, "
        "odd = [2]: not known for Cohere2ForCausalLM, and it may change the maths"
    )


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Phi3", {"rope_scaling": LONGROPE, "max_position_embeddings": 131072}),
        ("Phi3", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 8192}}),
        (
            "Ministral3",
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2.0,
                    "llama_4_scaling_beta": 0.5,
                    "original_max_position_embeddings": 100,
                }
            },
        ),
        ("Olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 5e5}),
        ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 9e3}),
    ],
)
def test_what_stands_beside_the_rotation(architecture, config, model_dir):
    """Files of before release 5 of transformers, against what that makes of them."""
    heads = {"num_attention_heads": 4, "hidden_size": 64, "head_dim": 16}
    if architecture == "Phi3":
        del heads["head_dim"]
        config |= {"pad_token_id": 0, "eos_token_id": 1}
    config |= heads | {"num_key_value_heads": 2}
    written = config_of(architecture, **config).to_dict()
    named = {"architectures": [f"{architecture}ForCausalLM"]}
    ours = load_description(model_dir(config | named))
    theirs = load_description(model_dir(written | named))
    assert ours.ropes == theirs.ropes
    assert ours.query_growths == theirs.query_growths


@pytest.mark.parametrize("architecture", ["Gemma3", "Gemma4", "Olmo3"])
@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": "yarn"},
        {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "linear"}},
    ],
)
def test_one_rotation_for_layers_of_several_kinds_is_refused(architecture, config, model_dir):
    """Transformers passes over it."""
    config |= {"architectures": [f"{architecture}ForCausalLM"]}
    with pytest.raises(UnsupportedModel, match=r"config\.json: rope_(parameters|scaling) = "):
        load_description(model_dir(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_transformers_saves_are_known(family, tmp_path):
    """A config as the installed version writes it, its generation defaults included."""
    config = config_of(family, architectures=[f"{family}ForCausalLM"])
    everything = config.to_dict() | transformers.GenerationConfig().to_dict()
    everything |= {"_name_or_path": "x/y", "torch_dtype": "bfloat16", "rope_scaling": None}
    everything["eos_token_id"] = 2
    (tmp_path / "config.json").write_text(json.dumps(everything))
    assert load_description(tmp_path).eos_token_ids == (2,)


BASE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 2.0}
REFUSED = {
    "other architecture": (
        "Llama",
        {"architectures": ["BloomForCausalLM"]},
        r"architectures = \['BloomForCausalLM'\]: supported is one of Cohere2ForCausalLM, .*, "
        r"Mistral3ForConditionalGeneration, .*; docs/models\.md",
    ),
    "almost an architecture": (
        "Llama",
        {"architectures": ["LLamaForCausalLM"]},
        r"architectures = .* \(did you mean \['LlamaForCausalLM'\]\?\): supported is",
    ),
    "no architecture": ("Llama", {"architectures": None}, r"config\.json has no architectures, "),
    "empty architectures": ("Llama", {"architectures": []}, r"config\.json has no architectures, "),
    "architecture is a list": (
        "Llama",
        {"architectures": [["LlamaForCausalLM"]]},
        "architectures",
    ),
    "two architectures": (
        "Llama",
        {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
        "architectures",
    ),
    "activation": ("Llama", {"hidden_act": "gelu"}, "hidden_act"),
    "dynamic rope": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "dynamic rope, new": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_parameters.rope_type 'dynamic'",
    ),
    "longrope": ("Llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    "rope per layer type": (
        "Qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention",
    ),
    "rope is not an object": ("Llama", {"rope_scaling": 2.0}, "rope_scaling"),
    "rope key": ("Llama", {"rope_parameters": YARN | {"low_freq_factor": 1.0}}, "low_freq_factor"),
    "rope value": ("Llama", {"rope_parameters": YARN | {"beta_fast": "32"}}, "beta_fast"),
    "rope factor": ("Llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    "rope theta": ("Llama", {"rope_theta": -1.0}, "rope_theta"),
    "rope type is a list": ("Llama", {"rope_scaling": {"type": ["linear"]}}, "rope_type"),
    "partial rope": ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partial rope, new": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "softcapping": ("Mistral", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "quantised": (
        "Llama",
        {"quantization_config": {"bits": 4}},
        "config.json: quantization_config.quant_method = None: supported are .*; serve the plain",
    ),
    "own code": ("Llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    "per layer": ("Llama", {"per_layer_config": {"0": {"hidden_size": 1}}}, "per_layer_config"),
    "unknown": ("Llama", {"residual_multiplier": 0.22}, "residual_multiplier"),
    "window of Llama": ("Llama", {"sliding_window": 4096}, "sliding_window"),
    "bias of Mistral": ("Mistral", {"attention_bias": True}, "attention_bias"),
    "mlp bias of Qwen3": ("Qwen3", {"mlp_bias": True}, "mlp_bias"),
    "layer types of Mistral": (
        "Mistral",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "layer types of Llama": (
        "Llama",
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "sliding_attention",
    ),
    "unknown layer type": (
        "Qwen3",
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        "linear_attention",
    ),
    "sliding without a window": (
        "Qwen2",
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "layer_types",
    ),
    "layer type is a list": (
        "Qwen2",
        {"num_hidden_layers": 1, "layer_types": [["full_attention"]]},
        "layer_types",
    ),
    "too few layer types": ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    "heads": ("Llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    "head size": ("Llama", {"hidden_size": 66}, "hidden_size"),
    "odd head": ("Llama", {"head_dim": 15}, "head_dim"),
    "zero": ("Llama", {"vocab_size": 0}, "vocab_size"),
    "a string": ("Llama", {"num_hidden_layers": "2"}, "num_hidden_layers"),
    "layers without end": ("Llama", {"num_hidden_layers": 1 << 40}, "must be 1 to 1024"),
    "more of them": ("Glm4Moe", {"num_nextn_predict_layers": 1 << 40}, "must be 0 to 1024"),
    "flag": ("Llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    "epsilon": ("Llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    "eos": ("Llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    "head of keys": ("Qwen3_5", {"linear_key_head_dim": 257}, "linear_key_head_dim = 257: must be"),
    "heads of values": ("Qwen3_5", {"linear_num_value_heads": 24}, "no multiple of"),
    "convolution": ("Qwen3_5", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
    "a size twice": ("Lfm2", {"conv_dim": 8}, "conv_dim = 8: must be hidden_size, 64"),
    "heads twice": ("Lfm2Moe", {"num_heads": 2}, "num_heads = 2: must be num_attention_heads, 4"),
    "absurd heads": ("Qwen3_5", {"linear_num_key_heads": 10**8}, "linear_num_key_heads"),
    "absurd heads of attention": (
        "Llama",
        {"num_attention_heads": 10**8, "num_key_value_heads": 1, "head_dim": 16},
        "num_attention_heads = 100000000: must be",
    ),
    "head of values": ("Qwen3_5", {"linear_value_head_dim": 2048}, "linear_value_head_dim"),
    "absurd factor": ("Lfm2", {"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier"),
    "no feed-forward": ("Lfm2", {"block_ffn_dim_multiplier": 1e-9}, "leaves no element"),
    "convolution of one": ("Lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
    "bias of a convolution": ("Lfm2", {"conv_bias": True}, "conv_bias"),
    "no attention": (
        "Qwen3_5",
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        "layer_types = .*: one layer at least must have full_attention",
    ),
    "no attention in LFM2": ("Lfm2", {"full_attn_idxs": []}, "full_attention"),
    "attention by name": ("Lfm2", {"full_attn_idxs": ["0"]}, "full_attn_idxs"),
}


def test_labels_without_end_are_refused(model_dir):
    config = {"architectures": ["LlamaForSequenceClassification"]} | BASE
    assert load_description(model_dir(config | {"num_labels": 1024})).labels[-1] == "LABEL_1023"
    with pytest.raises(UnsupportedModel, match="num_labels = 1025: at most 1024"):
        load_description(model_dir(config | {"num_labels": 1025}))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, model_dir):
    family, changes, culprit = REFUSED[name]
    config = {"architectures": [f"{family}ForCausalLM"]} | BASE
    load_description(model_dir(config))
    with pytest.raises(UnsupportedModel, match=culprit):
        load_description(model_dir(config | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": None},
        {"use_sliding_window": False},
        {"pruned_heads": {}},
        {"partial_rotary_factor": 1.0},
        {"layer_types": ["full_attention"], "num_hidden_layers": 1},
        {"rope_parameters": {"rope_type": "default", "type": "default"}},
    ],
)
def test_disabled_features_are_accepted(changes, model_dir):
    load_description(model_dir({"architectures": ["LlamaForCausalLM"]} | BASE | changes))


def test_sliding_windows_of_qwen(model_dir):
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "max_window_layers": 3,
    }
    assert windows(load_description(model_dir(config))) == (None,) * 4
    config["use_sliding_window"] = True
    assert windows(load_description(model_dir(config))) == (None, None, None, 8)
    config["layer_types"] = ["sliding_attention"] * 2 + ["full_attention"] * 2
    assert windows(load_description(model_dir(config))) == (8, 8, None, None)


def test_generation_config_overrides_end_tokens(model_dir):
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 5}
    assert load_description(model_dir(config)).eos_token_ids == (5,)
    assert load_description(model_dir(config, {"eos_token_id": [7, 5, 7]})).eos_token_ids == (7, 5)
    assert load_description(model_dir(config, {"eos_token_id": None})).eos_token_ids == (5,)
    config["eos_token_id"] = None
    assert load_description(model_dir(config)).eos_token_ids == ()


def test_config_sha256_is_of_the_content(tmp_path):
    path = tmp_path / "config.json"
    hashes = []
    for text in (
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 100}',
        '{"vocab_size":100,\n "architectures":["LlamaForCausalLM"]}',
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 101}',
    ):
        path.write_text(text)
        hashes.append(load_description(tmp_path).config_sha256)
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0] == "7b1b4473a55393cdc82050c5112e2cafe1722ac2513de3a1a9a789ca8d33cde6"


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_unreadable_config(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        load_description(tmp_path)
