"""A Llama in one GGUF file, written as a folder in Hugging Face's format.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the package `gguf` reads it
and dequantises. Weights become bf16, rounded to nearest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

if TYPE_CHECKING:
    from gguf import GGUFReader

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
CONTROL_TOKEN = 3
"""The token type of special tokens (llama.cpp's LLAMA_TOKEN_TYPE_CONTROL)."""


def write_folder(
    gguf: Path, folder: Path, name: str, end_of_turn: str, progress: Callable[[int, int], None]
) -> None:
    """Writes config, tokenizer and weights of a Llama with tied embeddings into `folder`.

    Args:
        gguf: File of a model of the architecture "llama" with a byte-level tokenizer whose digits
            are tokens of their own, as SmolLM2's.
        folder: An empty folder.
        name: The model's name on the Hub, for config.json.
        end_of_turn: The token that ends an answer.
        progress: Called with the number of tensors that are done, and of all.

    Raises:
        ImportError: The package `gguf` is not installed.
        OSError: The folder cannot be written, or its disk is full.
        ValueError: The file is of another architecture, or has another tokenizer.
    """
    from gguf import GGUFReader  # of the extra "demo"

    reader = GGUFReader(gguf)
    _check(reader)
    _write_json(folder / "config.json", _config(reader, name))
    _write_tokenizer(reader, folder, end_of_turn)
    stop = _metadata(reader, "tokenizer.ggml.tokens").index(end_of_turn)
    ids = {"eos_token_id": stop, "bos_token_id": _metadata(reader, "tokenizer.ggml.bos_token_id")}
    _write_json(folder / "generation_config.json", ids)
    weights = _weights(reader, progress)
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # also for a full disk
        raise OSError(f"{folder / 'model.safetensors'} cannot be written: {error}") from error


def _check(reader: GGUFReader) -> None:
    """Raises ValueError for a file that this module does not convert."""
    for key, expected in {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }.items():
        if (found := _metadata(reader, key)) != expected:
            raise ValueError(f"{key} is {found!r}, expected {expected!r}")


def _metadata(reader: GGUFReader, key: str) -> Any:
    """Returns a value of the file's metadata. Raises ValueError if it has none of this name."""
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the file has no {key}")
    return field.contents()


def _config(reader: GGUFReader, name: str) -> dict[str, Any]:
    def value(key: str) -> Any:
        return _metadata(reader, f"llama.{key}")

    return {
        "_name_or_path": name,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "vocab_size": value("vocab_size"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base"),
        # A float32 there, which JSON would write as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": _metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _metadata(reader, "tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(reader: GGUFReader, folder: Path, end_of_turn: str) -> None:
    tokens = _metadata(reader, "tokenizer.ggml.tokens")
    merges = [tuple(each.split(" ")) for each in _metadata(reader, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _metadata(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_metadata(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": end_of_turn,
        "pad_token": end_of_turn,
        "unk_token": tokens[_metadata(reader, "tokenizer.ggml.unknown_token_id")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _metadata(reader, "llama.context_length"),
    }
    _write_json(folder / "tokenizer_config.json", words)
    template = _metadata(reader, "tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _weights(reader: GGUFReader, progress: Callable[[int, int], None]) -> dict[str, Tensor]:
    from gguf.quants import dequantize

    heads = {
        "attn_q": _metadata(reader, "llama.attention.head_count"),
        "attn_k": _metadata(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for number, each in enumerate(reader.tensors, 1):
        values = torch.tensor(dequantize(each.data, each.tensor_type))
        parts = each.name.split(".")
        if (part := parts[-2]) in heads:
            values = _unpermuted(values, heads[part])
        weights[_name(each.name, parts)] = values.to(torch.bfloat16).contiguous()
        progress(number, len(reader.tensors))
    return weights


def _name(name: str, parts: list[str]) -> str:
    """Returns the name in Hugging Face's format of a tensor "blk.3.attn_q.weight"."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in BLOCK_NAMES:
        raise ValueError(f"unknown tensor {name}")
    return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"


def _unpermuted(weight: Tensor, num_heads: int) -> Tensor:
    """Returns a projection [outputs, inputs] with each head's halves apart, as Hugging Face rotates
    them. llama.cpp rotates neighbours, so its converter interleaves the halves."""
    outputs, inputs = weight.shape
    pairs = weight.view(num_heads, outputs // num_heads // 2, 2, inputs)
    return pairs.transpose(1, 2).reshape(outputs, inputs)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
