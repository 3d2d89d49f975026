"""Reads a model directory's safetensors into the decoder's buffers, in one pass.

Projections that read the same input lie in one buffer: q, k and v in `qkv`, gate and up in
`gate_up`. Each tensor is read once, in the order of its file, and copied to its place in a buffer;
a projection is made as soon as all its tensors are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import (
    EMBED_TOKENS,
    LM_HEAD,
    Block,
    Decoder,
    Norm,
    NormKind,
    Projection,
    Wrapper,
    layer_path,
)
from inference_svc.model.files import weight_files
from inference_svc.model.layers import Linear
from kernels.elementwise import NormWeight

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


class Packed(Protocol):
    """A projection's weight in the form that a backend computes with."""

    @property
    def num_bytes(self) -> int: ...


P = TypeVar("P", bound=Packed)


@dataclass(frozen=True, slots=True)
class BlockWeights(Generic[P]):
    """The weights of a `Block`, by its names; None for what it does not have."""

    attention_norm: NormWeight | None
    qkv: P
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    o: P
    attention_post_norm: NormWeight | None
    feed_forward_norm: NormWeight | None
    gate_up: P
    down: P
    feed_forward_post_norm: NormWeight | None

    @classmethod
    def build(
        cls,
        block: Block,
        make_projection: Callable[[Projection], P],
        make_norm: Callable[[Norm], NormWeight],
    ) -> BlockWeights[P]:
        """Makes a block's weights one by one."""

        def norm(description: Norm | None) -> NormWeight | None:
            return None if description is None else make_norm(description)

        attention, feed_forward = block.attention, block.feed_forward
        return cls(
            attention_norm=norm(block.attention_norm),
            qkv=make_projection(attention.qkv),
            q_norm=norm(attention.q_norm),
            k_norm=norm(attention.k_norm),
            o=make_projection(attention.out),
            attention_post_norm=norm(block.attention_post_norm),
            feed_forward_norm=norm(block.feed_forward_norm),
            gate_up=make_projection(feed_forward.gate_up),
            down=make_projection(feed_forward.down),
            feed_forward_post_norm=norm(block.feed_forward_post_norm),
        )


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[P]):
    """All weights of a decoder; `embedding` is [vocab_size, hidden_size]. `num_bytes` counts bytes
    in memory: a tied head that shares the embedding's tensor is counted once."""

    embedding: Tensor
    blocks: tuple[BlockWeights[P], ...]
    norm: NormWeight
    head: P
    num_bytes: int


def load_weights(
    model_dir: Path,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device | str,
    make_projection: Callable[[Tensor, Tensor | None], P],
) -> ModelWeights[P]:
    """Reads `model.safetensors`, or the shards of `model.safetensors.index.json`, cast to `dtype`.

    `make_projection` makes each projection of its weight [out, in] and bias [out]; what it does not
    keep is freed. Never holds more than the weights, one projection and one tensor of a file.
    Raises UnsupportedModel naming a missing, unexpected or misshapen tensor, before anything large
    is allocated.
    """
    from safetensors import safe_open  # models that are made in memory do without

    parameters = _parameters(decoder)
    tensors = _tensors(model_dir, decoder.wrapper)
    _check(tensors, parameters)
    assembly = _Assembly(decoder, parameters, dtype, torch.device(device), make_projection)
    for tensor in tensors:
        if tensor.name in assembly:
            # Opened for each tensor anew: pages of a mapping that stays open would count as ours
            # until the whole file had been read.
            with safe_open(tensor.path, framework="pt") as file:
                assembly.add(tensor.name, file.get_tensor(tensor.stored_name))
    return assembly.finish()


def weights_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Returns what `load_weights` will take with plain projections, without allocating."""
    return sum(each.num_bytes(dtype) for each in _parameters(decoder))


def largest_projection_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Returns the size of the largest projection that `load_weights` reads and then converts. A
    tied head is not read: it is made from the embedding, which stays."""
    return max(each.num_bytes(dtype) for each in _parameters(decoder) if each.is_projection)


class Vector(NamedTuple):
    """A norm's weight or a bias of a projection, by the name that adapters have it under, and its
    tensor's in the checkpoint."""

    name: str
    tensor: str
    layer: int | None
    size: int


def vectors(decoder: Decoder) -> Iterator[Vector]:
    """Yields the model's vectors in order of use."""
    for parameter in _parameters(decoder):
        for name, size in parameter.members.items():
            if not parameter.in_size:
                yield Vector(name, f"{name}.weight", parameter.layer, size)
            elif parameter.has_bias:
                yield Vector(f"{name}.bias", f"{name}.bias", parameter.layer, size)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A part of the decoder, and the tensors of the file that lie below each other in it.

    `key` is such as "layers.0.qkv", of a norm its module; `rows` maps the tensors' names, without
    ".weight" or ".bias", to their sizes; `members` the same by the names of the modules that
    adapters know. `in_size` is 0 for a norm's weight.
    """

    key: str
    rows: dict[str, int]
    members: dict[str, int]
    in_size: int = 0
    has_bias: bool = False
    is_projection: bool = False
    layer: int | None = None
    norm: Norm | None = None

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())

    def num_bytes(self, dtype: torch.dtype) -> int:
        is_wide = self.norm is not None and self.norm.is_wide
        item_bytes = (torch.float32 if is_wide else dtype).itemsize
        return self.num_rows * ((self.in_size or 1) + self.has_bias) * item_bytes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the file's tensors by name."""
        inner = (self.in_size,) if self.in_size else ()
        shapes: dict[str, tuple[int, ...]] = {}
        for name, size in self.rows.items():
            shapes[f"{name}.weight"] = (size, *inner)
            if self.has_bias:
                shapes[f"{name}.bias"] = (size,)
        return shapes


def _parameters(decoder: Decoder) -> list[_Parameter]:
    """Returns all parameters of a decoder, in order of use."""
    embedding = {EMBED_TOKENS: decoder.vocab_size}
    found = [_Parameter("embedding", embedding, embedding, decoder.hidden_size)]
    for index, block in enumerate(decoder.blocks):
        found += _block_parameters(block, index)
    final = {decoder.final_norm.module: decoder.final_norm.size}
    found.append(_Parameter("norm", final, final, norm=decoder.final_norm))
    if not decoder.head.is_tied:
        rows = {LM_HEAD: decoder.vocab_size}
        found.append(_Parameter("head", rows, rows, decoder.hidden_size, is_projection=True))
    return found


def _block_parameters(block: Block, layer: int) -> Iterator[_Parameter]:
    attention = block.attention

    def norms(*found: Norm | None) -> Iterator[_Parameter]:
        for norm in filter(None, found):
            path = layer_path(layer, norm.module)
            rows = {path: norm.size}
            yield _Parameter(path, rows, rows, layer=layer, norm=norm)

    def projection(each: Projection) -> _Parameter:
        rows, members = (
            {layer_path(layer, module): size for module, size in modules}
            for modules in (each.stored, each.members)
        )
        return _Parameter(
            *(f"layers.{layer}.{each.name}", rows, members, each.in_features, each.has_bias),
            is_projection=True,
            layer=layer,
        )

    yield from norms(block.attention_norm)
    yield projection(attention.qkv)
    yield from norms(attention.q_norm, attention.k_norm)
    yield projection(attention.out)
    yield from norms(block.attention_post_norm, block.feed_forward_norm)
    yield projection(block.feed_forward.gate_up)
    yield projection(block.feed_forward.down)
    yield from norms(block.feed_forward_post_norm)


@dataclass(eq=False, slots=True)
class _Buffers:
    """A parameter that is being read: `places` are those of the tensors still to come."""

    weight: Tensor
    bias: Tensor | None
    places: dict[str, Tensor]

    @classmethod
    def allocate(cls, parameter: _Parameter, dtype: torch.dtype, device: torch.device) -> _Buffers:
        inner = (parameter.in_size,) if parameter.in_size else ()
        if parameter.norm is not None and parameter.norm.is_wide:
            dtype = torch.float32
        weight = torch.empty(parameter.num_rows, *inner, dtype=dtype, device=device)
        bias = weight.new_empty(parameter.num_rows) if parameter.has_bias else None
        places: dict[str, Tensor] = {}
        sizes = list(parameter.rows.values())
        for suffix, buffer in (("weight", weight), ("bias", bias)):
            if buffer is not None:
                names = (f"{name}.{suffix}" for name in parameter.rows)
                places.update(zip(names, buffer.split(sizes), strict=True))
        return cls(weight, bias, places)


class _Assembly(Generic[P]):
    """Puts tensors, in any order, into parameters, and these into a decoder's weights."""

    def __init__(
        self,
        decoder: Decoder,
        parameters: list[_Parameter],
        dtype: torch.dtype,
        device: torch.device,
        make_projection: Callable[[Tensor, Tensor | None], P],
    ) -> None:
        self._decoder, self._dtype, self._device = decoder, dtype, device
        self._make_projection = make_projection
        self._parameter_of = {name: each for each in parameters for name in each.shapes}
        self._reading: dict[str, _Buffers] = {}
        self._made: dict[str, Any] = {}
        self._num_bytes = 0

    def __contains__(self, tensor_name: str) -> bool:
        return tensor_name in self._parameter_of

    def add(self, tensor_name: str, tensor: Tensor) -> None:
        parameter = self._parameter_of[tensor_name]
        buffers = self._reading.get(parameter.key)
        if buffers is None:
            buffers = _Buffers.allocate(parameter, self._dtype, self._device)
            self._reading[parameter.key] = buffers
        buffers.places.pop(tensor_name).copy_(tensor)
        if not buffers.places:
            del self._reading[parameter.key]
            self._made[parameter.key] = self._make(parameter, buffers)

    def _make(self, parameter: _Parameter, buffers: _Buffers) -> object:
        if parameter.is_projection:
            projection = self._make_projection(buffers.weight, buffers.bias)
            self._num_bytes += projection.num_bytes
            return projection
        self._num_bytes += buffers.weight.nbytes
        if parameter.norm is None:
            return buffers.weight
        buffers.weight += parameter.norm.weight_offset
        is_centred = parameter.norm.kind is NormKind.LAYER
        return NormWeight(buffers.weight, parameter.norm.eps, is_centred)

    def finish(self) -> ModelWeights[P]:
        """Returns the weights; every tensor must have been added."""
        assert not self._reading
        made = self._made
        if self._decoder.head.is_tied:
            made["head"] = head = self._make_projection(made["embedding"], None)
            if not isinstance(head, Linear):
                self._num_bytes += head.num_bytes
        blocks = tuple(self._block(index) for index in range(self._decoder.num_layers))
        return ModelWeights(made["embedding"], blocks, made["norm"], made["head"], self._num_bytes)

    def _block(self, index: int) -> BlockWeights[P]:
        return BlockWeights.build(
            self._decoder.blocks[index],
            lambda projection: self._made[f"layers.{index}.{projection.name}"],
            lambda norm: self._made[layer_path(index, norm.module)],
        )


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor of a file, as the file's header has it; `name` is what a model of text alone calls
    it."""

    name: str
    stored_name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str


def _tensors(model_dir: Path, wrapper: Wrapper) -> list[_StoredTensor]:
    """Returns the tensors of a model directory but for those of other towers, in the order in which
    they lie in its files."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, _StoredTensor] = {}
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.offset_keys():
                    name = wrapper.text_name(stored)
                    if name is None:
                        continue
                    header = file.get_slice(stored)
                    shape = tuple(header.get_shape())
                    found[name] = _StoredTensor(name, stored, path, shape, header.get_dtype())
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return list(found.values())


def _check(tensors: list[_StoredTensor], parameters: list[_Parameter]) -> None:
    shapes = {name: shape for each in parameters for name, shape in each.shapes.items()}
    names = {tensor.name for tensor in tensors}
    missing = sorted(shapes.keys() - names)
    unexpected = sorted(name for name in names - shapes.keys() if not _is_ignored(name))
    for what, found in (("missing", missing), ("unexpected", unexpected)):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UnsupportedModel(f"{what} tensors: {', '.join(found[:5])}{more}")
    for tensor in tensors:
        if tensor.name in shapes:
            _check_tensor(tensor, shapes[tensor.name])


def _check_tensor(tensor: _StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise UnsupportedModel(
            f"{tensor.name} has shape {list(tensor.shape)}, config.json says {list(shape)}"
        )
    if tensor.dtype not in _FLOAT_DTYPES:
        raise UnsupportedModel(f"{tensor.name} has dtype {tensor.dtype}, which is not supported")


def _is_ignored(name: str) -> bool:
    """Returns whether old files hold it unused: rotary frequencies, or the head of a tied model."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
