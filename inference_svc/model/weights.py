"""A model directory's safetensors, read straight into the decoder's final buffers.

Projections that read the same input lie in one buffer: q, k and v in `qkv`, gate and up in
`gate_up`. A tensor of the file is copied once, into its place in such a buffer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.layers import Linear, RMSNorm

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embedding` is [vocab_size, hidden_size]; a tied `head` shares its memory."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: RMSNorm
    head: Linear
    num_bytes: int


def load_weights(
    model_dir: Path, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> ModelWeights:
    """Reads `model.safetensors`, or the shards of `model.safetensors.index.json`, cast to `dtype`.

    Never holds more than the weights and one tensor of a file. Raises UnsupportedModel naming a
    missing, unexpected or misshapen tensor, before anything large is allocated.
    """
    files = _tensor_files(model_dir)
    layout = _Buffers(geometry, dtype, torch.device("meta"))
    _check(files, layout)
    buffers = _Buffers(geometry, dtype, torch.device(device))
    for name, destination in buffers.places.items():
        # Opened for each tensor anew: pages of a mapping that stays open would count as ours
        # until the whole file had been read.
        with safe_open(files[name], framework="pt") as file:
            destination.copy_(file.get_tensor(name))
    return buffers.weights()


class _Buffers:
    """Allocates the final buffers; `places` maps every tensor's name to its part of one."""

    def __init__(self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> None:
        self._geometry, self._dtype, self._device = geometry, dtype, device
        self.places: dict[str, Tensor] = {}
        self._num_bytes = 0
        hidden = geometry.hidden_size
        self._embedding = self._allocate({"model.embed_tokens.weight": geometry.vocab_size}, hidden)
        self._layers = tuple(self._layer(index) for index in range(geometry.num_layers))
        self._norm = self._rms_norm("model.norm", hidden)
        self._head = Linear(self._embedding)
        if not geometry.tie_word_embeddings:
            self._head = self._linear("", {"lm_head": geometry.vocab_size}, hidden, bias=False)

    def weights(self) -> ModelWeights:
        return ModelWeights(self._embedding, self._layers, self._norm, self._head, self._num_bytes)

    def _layer(self, index: int) -> LayerWeights:
        g, prefix = self._geometry, f"model.layers.{index}."
        qkv = {"q_proj": g.q_size, "k_proj": g.kv_size, "v_proj": g.kv_size}
        gate_up = {"gate_proj": g.intermediate_size, "up_proj": g.intermediate_size}
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return LayerWeights(
            input_norm=self._rms_norm(prefix + "input_layernorm", g.hidden_size),
            qkv=self._linear(attention, qkv, g.hidden_size, bias=g.qkv_bias),
            q_norm=self._rms_norm(attention + "q_norm", g.head_dim) if g.qk_norm else None,
            k_norm=self._rms_norm(attention + "k_norm", g.head_dim) if g.qk_norm else None,
            o=self._linear(attention, {"o_proj": g.hidden_size}, g.q_size, bias=g.o_bias),
            post_attention_norm=self._rms_norm(prefix + "post_attention_layernorm", g.hidden_size),
            gate_up=self._linear(mlp, gate_up, g.hidden_size, bias=g.mlp_bias),
            down=self._linear(
                mlp, {"down_proj": g.hidden_size}, g.intermediate_size, bias=g.mlp_bias
            ),
        )

    def _linear(self, prefix: str, outs: dict[str, int], in_size: int, *, bias: bool) -> Linear:
        weights = {f"{prefix}{name}.weight": size for name, size in outs.items()}
        biases = {f"{prefix}{name}.bias": size for name, size in outs.items()}
        return Linear(self._allocate(weights, in_size), self._allocate(biases) if bias else None)

    def _rms_norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._allocate({name + ".weight": size}), self._geometry.rms_norm_eps)

    def _allocate(self, sizes: dict[str, int], *inner: int) -> Tensor:
        """One buffer for tensors that lie below each other."""
        buffer = torch.empty(sum(sizes.values()), *inner, dtype=self._dtype, device=self._device)
        self.places.update(zip(sizes, buffer.split(list(sizes.values())), strict=True))
        self._num_bytes += buffer.numel() * buffer.element_size()
        return buffer


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """The file of every tensor of the model directory."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.exists():
        paths = [single]
    elif index.exists():
        paths = _shards(index)
    else:
        raise UnsupportedModel(f"{model_dir} holds neither {single.name} nor {index.name}")
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                files.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return files


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(
            {Path(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{index} cannot be read: {error!r}") from error
    for name in names:
        if name.name != str(name):
            raise UnsupportedModel(f"{index} names a file elsewhere: {name}")
    return [index.parent / name for name in names]


def _check(files: dict[str, Path], layout: _Buffers) -> None:
    wanted = layout.places.keys()
    missing = sorted(wanted - files.keys())
    unexpected = sorted(name for name in files.keys() - wanted if not _is_spare(name))
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UnsupportedModel(f"{what} tensors: {', '.join(names[:5])}{more}")
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in wanted & set(file.keys()):
                _check_tensor(name, file.get_slice(name), layout.places[name])


def _check_tensor(name: str, found: Any, place: Tensor) -> None:
    shape, wanted = list(found.get_shape()), list(place.shape)
    if shape != wanted:
        raise UnsupportedModel(f"{name} has shape {shape}, config.json says {wanted}")
    if found.get_dtype() not in _FLOAT_DTYPES:
        raise UnsupportedModel(f"{name} has dtype {found.get_dtype()}, which is not supported")


def _is_spare(name: str) -> bool:
    """Old files carry the rotary frequencies, and some of tied models the head as well."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
