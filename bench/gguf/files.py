"""Writes models and LoRA adapters as GGUF files, as llama.cpp's converters do.

The names of tensors, the keys and the blocks are the package `gguf`'s. llama.cpp's
`convert_hf_to_gguf.py` and `convert_lora_to_gguf.py` define the rest: the order of the rows of q
and k, and an adapter's keys. https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors import safe_open

from bench.models import SHAPES, Prepared

ARCHITECTURE = "llama"
KINDS = {"proj.weight": "Q4_0", "embed_tokens.weight": "Q8_0", "lm_head.weight": "Q8_0"}
"""The types of a model's matrices by the ends of their names. llama.cpp's own files of the type
Q4_0 have more than four bits in the head, too."""
ADAPTER_KIND = "F16"
"""llama.cpp computes faster with it than with its converter's default, F32."""


class ModelFile:
    """A file that is being made, whose tensors are added by their names in transformers.

    `metadata` has values in addition to the config, or in place of its own; a key that begins with
    a dot is the architecture's.
    """

    def __init__(
        self, path: Path, architecture: str, config: Any, metadata: Mapping[str, Any]
    ) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self._architecture, self._config = architecture, config
        for key, value in {**_sizes(config), **metadata}.items():
            _add(self.writer, f"{architecture}{key}" if key.startswith(".") else key, value)
        self._names = tensor_names(architecture, config)

    def num_interleaved_heads(self, name: str) -> int:
        """Returns the heads of a weight whose rows the file has `interleaved`, 0 for others."""
        return num_interleaved_heads(name, self._config) if self._architecture == "llama" else 0

    def add(self, name: str, values: np.ndarray, kind: str = "") -> None:
        """Adds a tensor: values in fp32 or fp16, or the bytes of rows of blocks of a `kind`."""
        raw = gguf.GGMLQuantizationType[kind] if kind else None
        self.writer.add_tensor(stored_name(self._names, name), values, raw_dtype=raw)

    def write(self) -> None:
        _write(self.writer)


def tensor_names(architecture: str, config: Any) -> gguf.TensorNameMap:
    """Returns the names of tensors in files by their names in transformers."""
    found = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(found, config.num_hidden_layers)


def stored_name(names: gguf.TensorNameMap, name: str) -> str:
    """Returns a tensor's name in the file. Raises KeyError for a name that files do not have."""
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(f"{name}: the package gguf has no name for it")
    return str(found)


def num_interleaved_heads(name: str, config: Any) -> int:
    """Returns the heads of a llama's q or k, 0 for other tensors."""
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else 0


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns rows [outputs, ...] as the converter stores q and k of llama: the halves of each head
    in turns, because llama.cpp rotates neighbours."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def write_model(prepared: Prepared, path: Path) -> None:
    """Writes a Llama's safetensors as a file of few bits without a vocabulary."""
    config = SHAPES[prepared.name].make_config()
    metadata = {
        ".vocab_size": config.vocab_size,
        ".rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "tokenizer.ggml.model": "none",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q4_0),
    }
    file = ModelFile(path, ARCHITECTURE, config, metadata)
    for shard in sorted(prepared.model_dir.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                value = tensors.get_tensor(name).float()
                if heads := file.num_interleaved_heads(name):
                    value = interleaved(value, heads)
                kind = next((KINDS[end] for end in KINDS if name.endswith(end)), "")
                values = value.contiguous().numpy()
                if kind:
                    values = quantize(values, gguf.GGMLQuantizationType[kind])
                file.add(name, values, kind)
    file.write()


def write_adapter(folder: Path, config: Any, path: Path, kind: str = ADAPTER_KIND) -> None:
    """Writes a plain PEFT adapter of a Llama as a LoRA file. `config` is the model's, and `kind` is
    F16 or F32. Raises KeyError for a tensor that is no A or B of a weight."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    names = tensor_names(ARCHITECTURE, config)
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - no mapping
            module, _, side = name.removesuffix(".weight").rpartition(".lora_")
            module = module.removeprefix("base_model.model.") + ".weight"
            value = tensors.get_tensor(name).float()
            heads = num_interleaved_heads(module, config)
            if side == "B" and heads:
                value = interleaved(value, heads)
            values = value.contiguous().numpy().astype({"F16": np.float16, "F32": np.float32}[kind])
            writer.add_tensor(f"{stored_name(names, module)}.lora_{side.lower()}", values)
    _write(writer)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sizes(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return {
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
        ".attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "general.file_type": 15,
        "general.quantization_version": 2,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
