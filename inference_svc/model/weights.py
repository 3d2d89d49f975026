"""A model directory's safetensors, read straight into the decoder's final buffers.

Projections that read the same input lie in one buffer: q, k and v in `qkv`, gate and up in
`gate_up`. A tensor of the file is copied once, into its place in such a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.layers import Linear, RMSNorm

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


class Projection(Protocol):
    """A weight in whatever form it is computed with."""

    @property
    def num_bytes(self) -> int: ...


P = TypeVar("P", bound=Projection)


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[P]):
    input_norm: RMSNorm
    qkv: P
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: P
    post_attention_norm: RMSNorm
    gate_up: P
    down: P


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[P]):
    """`embedding` is [vocab_size, hidden_size]. `num_bytes` counts what lies in memory: a tied head
    that shares the embedding's is counted once."""

    embedding: Tensor
    layers: tuple[LayerWeights[P], ...]
    norm: RMSNorm
    head: P
    num_bytes: int


def load_weights(
    model_dir: Path,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    device: torch.device | str,
    make_projection: Callable[[Tensor, Tensor | None], P],
) -> ModelWeights[P]:
    """Reads `model.safetensors`, or the shards of `model.safetensors.index.json`, cast to `dtype`.

    `make_projection` makes each projection of its weight [out, in] and bias [out], as soon as they
    are read; what it does not keep is freed. Never holds more than the weights, one projection and
    one tensor of a file. Raises UnsupportedModel naming a missing, unexpected or misshapen tensor,
    before anything large is allocated.
    """
    files = _tensor_files(model_dir)
    places: dict[str, Tensor] = {}
    _Loader(geometry, dtype, torch.device("meta"), places.__setitem__, Linear).load()
    _check(files, places)

    def read(name: str, destination: Tensor) -> None:
        # Opened for each tensor anew: pages of a mapping that stays open would count as ours
        # until the whole file had been read.
        with safe_open(files[name], framework="pt") as file:
            destination.copy_(file.get_tensor(name))

    return _Loader(geometry, dtype, torch.device(device), read, make_projection).load()


def weights_bytes(geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """What `load_weights` will take with plain projections. Allocates nothing."""
    meta = torch.device("meta")
    return _Loader(geometry, dtype, meta, lambda name, place: None, Linear).load().num_bytes


def largest_projection_bytes(geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Of those that `load_weights` reads into a buffer and then has made into something else. A
    tied head is none: it is made from the embedding, which stays."""
    meta = torch.device("meta")
    loaded = _Loader(geometry, dtype, meta, lambda name, place: None, Linear).load()
    made = [each for layer in loaded.layers for each in (layer.qkv, layer.o, layer.gate_up)]
    made += [layer.down for layer in loaded.layers]
    if not geometry.tie_word_embeddings:
        made.append(loaded.head)
    return max(projection.num_bytes for projection in made)


class _Loader(Generic[P]):
    """Allocates buffers one after the other; `fill` gets every tensor's name and its part."""

    def __init__(
        self,
        geometry: ModelGeometry,
        dtype: torch.dtype,
        device: torch.device,
        fill: Callable[[str, Tensor], None],
        make_projection: Callable[[Tensor, Tensor | None], P],
    ) -> None:
        self._geometry, self._dtype, self._device = geometry, dtype, device
        self._fill, self._make_projection = fill, make_projection
        self._num_bytes = 0

    def load(self) -> ModelWeights[P]:
        g = self._geometry
        embedding = self._keep({"model.embed_tokens.weight": g.vocab_size}, g.hidden_size)
        layers = tuple(self._layer(index) for index in range(g.num_layers))
        norm = self._rms_norm("model.norm", g.hidden_size)
        if g.tie_word_embeddings:
            head = self._make_projection(embedding, None)
            if not isinstance(head, Linear):
                self._num_bytes += head.num_bytes
        else:
            head = self._projection("", {"lm_head": g.vocab_size}, g.hidden_size, bias=False)
        return ModelWeights(embedding, layers, norm, head, self._num_bytes)

    def _layer(self, index: int) -> LayerWeights[P]:
        g, prefix = self._geometry, f"model.layers.{index}."
        qkv = {"q_proj": g.q_size, "k_proj": g.kv_size, "v_proj": g.kv_size}
        gate_up = {"gate_proj": g.intermediate_size, "up_proj": g.intermediate_size}
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return LayerWeights(
            input_norm=self._rms_norm(prefix + "input_layernorm", g.hidden_size),
            qkv=self._projection(attention, qkv, g.hidden_size, bias=g.qkv_bias),
            q_norm=self._rms_norm(attention + "q_norm", g.head_dim) if g.qk_norm else None,
            k_norm=self._rms_norm(attention + "k_norm", g.head_dim) if g.qk_norm else None,
            o=self._projection(attention, {"o_proj": g.hidden_size}, g.q_size, bias=g.o_bias),
            post_attention_norm=self._rms_norm(prefix + "post_attention_layernorm", g.hidden_size),
            gate_up=self._projection(mlp, gate_up, g.hidden_size, bias=g.mlp_bias),
            down=self._projection(
                mlp, {"down_proj": g.hidden_size}, g.intermediate_size, bias=g.mlp_bias
            ),
        )

    def _projection(self, prefix: str, outs: dict[str, int], in_size: int, *, bias: bool) -> P:
        weights = {f"{prefix}{name}.weight": size for name, size in outs.items()}
        biases = {f"{prefix}{name}.bias": size for name, size in outs.items()}
        made = self._make_projection(
            self._read(weights, in_size), self._read(biases) if bias else None
        )
        self._num_bytes += made.num_bytes
        return made

    def _rms_norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._keep({name + ".weight": size}), self._geometry.rms_norm_eps)

    def _keep(self, sizes: dict[str, int], *inner: int) -> Tensor:
        buffer = self._read(sizes, *inner)
        self._num_bytes += buffer.nbytes
        return buffer

    def _read(self, sizes: dict[str, int], *inner: int) -> Tensor:
        """One buffer for tensors that lie below each other."""
        buffer = torch.empty(sum(sizes.values()), *inner, dtype=self._dtype, device=self._device)
        for name, part in zip(sizes, buffer.split(list(sizes.values())), strict=True):
            self._fill(name, part)
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


def _check(files: dict[str, Path], places: dict[str, Tensor]) -> None:
    wanted = places.keys()
    missing = sorted(wanted - files.keys())
    unexpected = sorted(name for name in files.keys() - wanted if not _is_spare(name))
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UnsupportedModel(f"{what} tensors: {', '.join(names[:5])}{more}")
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in wanted & set(file.keys()):
                _check_tensor(name, file.get_slice(name), places[name])


def _check_tensor(name: str, found: Any, place: Tensor) -> None:
    shape, wanted = list(found.get_shape()), list(place.shape)
    if shape != wanted:
        raise UnsupportedModel(f"{name} has shape {shape}, config.json says {wanted}")
    if found.get_dtype() not in _FLOAT_DTYPES:
        raise UnsupportedModel(f"{name} has dtype {found.get_dtype()}, which is not supported")


def _is_spare(name: str) -> bool:
    """Old files carry the rotary frequencies, and some of tied models the head as well."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
