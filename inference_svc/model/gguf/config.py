"""The metadata of a GGUF file as config.json and generation_config.json of transformers.

Each key of the model's architecture is honoured, or known to change nothing, or refused: a model
that is computed with other maths than it was trained with fails silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf.families import (
    ARCHITECTURE,
    EMBEDDING,
    HEAD,
    ROPE_FACTORS,
    family_of,
)
from inference_svc.model.gguf.file import PLAIN, Header, StoredTensor
from inference_svc.model.gguf.metadata import TOKENS, Values, short
from inference_svc.model.gguf.tensors import model_tensors, read_plain
from inference_svc.model.quantised.gguf import GgufScheme

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
"""The parameters that all published files with `rope_freqs` were made with; the converter keeps
factors alone."""
_FACTOR_TOLERANCE = 1e-4
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
    ]
)
"""Control tokens that end an answer whatever the metadata says, as llama.cpp takes them
(`special_eog_ids` in its llama-vocab.cpp): many files name only one of several."""
_CONTROL = 3
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p"}


def config_of(header: Header) -> dict[str, Any]:
    """Returns config.json of a file's model.

    Raises UnsupportedModel naming the key or the tensor that is not honoured, with its value.
    """
    family = family_of(header)
    values = Values(header)
    stored = {each.name: each for each in header.tensors}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": _dtype_of(header),
        "vocab_size": _vocab_size(values, stored),
        "num_hidden_layers": _num_layers(values, stored),
        "tie_word_embeddings": HEAD not in stored,
        **_sizes(values),
        **_OF_FAMILY[str(header.metadata[ARCHITECTURE])](values, stored),
    }
    if ROPE_FACTORS in stored:
        _add_rope_factors(header, stored[ROPE_FACTORS], config)
    values.check_all_known()
    scheme = _scheme(header)
    if scheme.types:
        config["quantization_config"] = scheme.to_config()
    for name in ("bos", "eos"):
        if (found := _token_id(header, f"{name}_token_id")) is not None:
            config[f"{name}_token_id"] = found
    return config


def generation_config_of(header: Header) -> dict[str, Any]:
    """Returns generation_config.json of a file's model: the tokens that end an answer, and
    defaults of sampling. Raises UnsupportedModel for an id that the vocabulary does not have."""
    found = [_token_id(header, name) for name in _END_IDS]
    ids = [each for each in found if each is not None]
    tokens = header.metadata.get(TOKENS)
    types = header.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        ids += [i for i, (each, kind) in pairs if kind == _CONTROL and each in _END_TOKENS]
    config: dict[str, Any] = {"eos_token_id": sorted(set(ids))} if ids else {}
    for key, name in _SAMPLING.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = short(value) if isinstance(value, float) else value
    return config


def _sizes(values: Values) -> dict[str, Any]:
    """Returns the keys that all families have."""
    hidden_size, num_heads = values.count("embedding_length"), values.count("attention.head_count")
    head_dim = values.count("attention.key_length", hidden_size // num_heads or None)
    values.require("attention.value_length", head_dim)
    values.require("rope.dimension_count", head_dim)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": values.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
    }


def _vocab_size(values: Values, stored: Mapping[str, StoredTensor]) -> int:
    """Returns the rows of the embedding, which the metadata may say too. Raises UnsupportedModel
    where that has none, or not one for each token."""
    embedding = stored.get(EMBEDDING)
    if embedding is None:
        raise values.fail_of(EMBEDDING, "no place in the file")
    found = embedding.shape[0]
    values.require("vocab_size", found)
    values.check_tokens(found)
    return found


def _num_layers(values: Values, stored: Mapping[str, StoredTensor]) -> int:
    found = values.count("block_count")
    if f"blk.{found - 1}.attn_q.weight" not in stored or f"blk.{found}.attn_q.weight" in stored:
        raise values.fail("block_count", "the tensors of the file are of another number of layers")
    return found


def _dtype_of(header: Header) -> str:
    """Returns the dtype to compute in: the one that all matrices are of, bfloat16 where these have
    few bits."""
    found = {each.type.name for each in header.tensors if len(each.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get("".join(found), "bfloat16")


def _scheme(header: Header) -> GgufScheme:
    return GgufScheme(
        {
            each.name.removesuffix(".weight"): each.dtype
            for each in model_tensors(header)
            if each.is_matrix and each.dtype not in PLAIN
        }
    )


def _token_id(header: Header, name: str) -> int | None:
    """Returns the id of a token with a role. Raises UnsupportedModel where no token has it."""
    key = f"tokenizer.ggml.{name}"
    found, tokens = header.metadata.get(key), header.metadata.get(TOKENS)
    if found is None:
        return None
    count = len(tokens) if isinstance(tokens, list) else None
    if type(found) is not int or found < 0 or (count is not None and found >= count):
        raise header.unsupported(key, f"no token of the vocabulary, which has {count or 0}")
    return found


# --- Rotation -----------------------------------------------------------------------------------


def _rope(values: Values, kinds: Sequence[str] = ("linear", "yarn")) -> dict[str, Any]:
    """Returns the parameters of the rotation, whose scaling may be one of these kinds."""
    found: dict[str, Any] = {"rope_theta": values.number("rope.freq_base", 10_000.0)}
    kind = values.get("rope.scaling.type")
    if kind is None and values.get("rope.scaling.factor") is not None:
        kind = "linear"
    if kind in (None, "none"):
        return found
    if kind not in kinds:
        raise values.fail("rope.scaling.type", f"supported are {', '.join(kinds)}")
    scaling = {"rope_type": kind, "factor": values.number("rope.scaling.factor")}
    if kind == "yarn":
        length = values.count("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    return {**found, "rope_scaling": scaling}


def _add_rope_factors(header: Header, stored: StoredTensor, config: dict[str, Any]) -> None:
    """Adds the parameters that the factors of frequencies in a file were made with.

    The converter keeps factors alone: `generate_extra_tensors` of its LlamaModel. Raises
    UnsupportedModel for others.
    """
    factors = [float(each) for each in read_plain(header, stored).double()]
    if all(each == 1 for each in factors):
        return
    if not all(math.isfinite(each) and each > 0 for each in factors):
        raise UnsupportedModel(f"{header.path}: the tensor {ROPE_FACTORS} must be above 0")
    scaling = {"rope_type": "llama3", "factor": short(max(factors)), **_LLAMA3}
    head_dim = config["head_dim"]
    # Lengths first, because a file may claim any size of a head.
    is_same = len(factors) == -(-head_dim // 2) and all(
        math.isclose(one, other, rel_tol=_FACTOR_TOLERANCE)
        for one, other in zip(
            factors, _llama3_factors(max(factors), config["rope_theta"], head_dim), strict=True
        )
    )
    if not is_same or "rope_scaling" in config:
        raise UnsupportedModel(
            f"{header.path}: the tensor {ROPE_FACTORS} does not have the factors of llama3 with "
            f"{_LLAMA3} and {_LLAMA3_LENGTH} positions: serve the model's safetensors"
        )
    config["rope_scaling"] = {**scaling, "original_max_position_embeddings": _LLAMA3_LENGTH}


def _llama3_factors(factor: float, theta: float, head_dim: int) -> list[float]:
    low, high = _LLAMA3.values()
    found = []
    for step in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (step / head_dim)
        smooth = (_LLAMA3_LENGTH / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


# --- Families -----------------------------------------------------------------------------------


def _llama(values: Values, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        **_rope(values),
    }


def _qwen(values: Values, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {"hidden_act": "silu", **_rope(values)}


def _gemma(values: Values, layers_of_other_scale: int) -> dict[str, Any]:
    """Returns the keys that both have. Models with this number of layers scale scores by the hidden
    size by heads in place of a head's size: files do not say so, llama.cpp knows it (LLM_TYPE_27B
    in its llama-model.cpp)."""
    sizes = _sizes(values)
    scaled_size = sizes["head_dim"]
    if values.count("block_count") == layers_of_other_scale:
        scaled_size = sizes["hidden_size"] // sizes["num_attention_heads"]
    found = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scaled_size}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.get(key) is not None:
            found[key] = values.number(key)
    return found


def _gemma2(values: Values, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    window = values.count("attention.sliding_window", 4096)
    return {**_gemma(values, 46), **_rope(values, kinds=()), "sliding_window": window}


def _gemma3(values: Values, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {
        **_gemma(values, 62),
        **_rope(values, kinds=("linear",)),
        "sliding_window": values.count("attention.sliding_window"),
        "sliding_window_pattern": values.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10_000.0),
    }


_OF_FAMILY: Mapping[str, Callable[[Values, Mapping[str, StoredTensor]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""The keys of a family beside the sizes, by `general.architecture`."""
