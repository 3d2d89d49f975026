"""Small GGUF files as llama.cpp's converter writes them, and what their models' weights are.

`bench.gguf.files` writes them. The layouts of blocks are the package `gguf`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from transformers import PreTrainedModel

from bench.gguf.files import ModelFile, interleaved

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}
"""Inputs of whole blocks of all types."""
_SCALES = {"Q4_0": 0.02, "Q4_1": 0.02, "Q5_0": 0.01, "Q5_1": 0.01, "Q8_0": 1.5e-3, "Q6_K": 1e-4}
_SCALES |= {"Q4_K": 4e-4, "Q5_K": 2e-4}
"""Factors of blocks with which weights have about the size of those of a model."""
_OFFSETS = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Smallest values of blocks by their factors."""


def random_blocks(kind: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Blocks of a matrix [out, in] with any codes, uint8 [out, bytes of a row]."""
    random = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // size, num_bytes), dtype=np.uint8)
    factors = random.uniform(0.5, 1.5, (len(blocks), 1)) * _SCALES[kind]
    at = num_bytes - 2 if kind == "Q6_K" else 0
    blocks[:, at : at + 2] = factors.astype(np.float16).view(np.uint8)
    if kind in _OFFSETS:
        blocks[:, 2:4] = (factors * _OFFSETS[kind]).astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def values_of(blocks: np.ndarray, kind: str) -> torch.Tensor:
    """The dequantised values, fp32 [out, in]."""
    return torch.from_numpy(dequantize(blocks, gguf.GGMLQuantizationType[kind]))


def apart(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as before `interleaved`."""
    order = interleaved(torch.arange(len(weight)), num_heads)
    found = torch.empty_like(weight)
    found[order] = weight
    return found


def write_gguf(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    kinds: Mapping[str, str],
    metadata: Mapping[str, Any],
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Writes a model, and gives the model the weights that the file has.

    `kinds` are the types of tensors, blocks of any codes, by the ends of their modules' names;
    others are in fp32. `metadata` has further values, those of the architecture with a dot first,
    and `extra` further tensors.
    """
    file = ModelFile(path, architecture, model.config, metadata)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for number, (name, value) in enumerate(state.items()):
        module = name.rpartition(".")[0]
        kind = next((kinds[end] for end in kinds if module.endswith(end)), "F32")
        kind = kind if value.ndim == 2 else "F32"
        adds_one = architecture.startswith("gemma") and name.endswith("norm.weight")
        _add_tensor(file, name, value, kind, number, adds_one=adds_one)
    for name, values in extra.items():
        file.writer.add_tensor(name, values)
    file.write()


def _add_tensor(
    file: ModelFile, name: str, value: torch.Tensor, kind: str, seed: int, *, adds_one: bool
) -> None:
    heads = file.num_interleaved_heads(name)
    if kind in _SCALES:
        blocks = random_blocks(kind, (value.shape[0], value.shape[1]), seed)
        values = values_of(blocks, kind)
        value.copy_(apart(values, heads) if heads else values)
        file.add(name, blocks, kind)
        return
    if kind == "F16":
        value.copy_(value.half())
    stored = value
    if heads:
        stored = interleaved(value, heads)
    elif adds_one:
        stored = value + 1
        value.copy_(stored - 1)  # rounded
    file.add(name, stored.numpy().astype(np.float16 if kind == "F16" else np.float32))


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """`rope_freqs` as the converter's `generate_extra_tensors` makes them, with its defaults."""
    low_wavelength, high_wavelength = 8192 / 1.0, 8192 / 4.0
    factors = []
    for step in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (step / head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
