"""Which tensors of a checkpoint a decoder has, and where each goes.

Projections that read the same input are one parameter: q, k and v in `qkv`, gate and up in
`gate_up`. Nothing is read or allocated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from inference_svc.model.description import (
    EMBED_TOKENS,
    LM_HEAD,
    Block,
    Decoder,
    LayerInputs,
    Norm,
    Projection,
    layer_path,
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A part of the decoder, and the tensors of the file that lie below each other in it.

    `key` is such as "layers.0.qkv", of a norm its module; `rows` maps the tensors' names, without
    ".weight" or ".bias", to their sizes; `members` the same by the names of the modules that
    adapters know. `in_size` is 0 for a norm's weight; a scalar is a tensor of one number that has
    its module's name.
    """

    key: str
    rows: dict[str, int]
    members: dict[str, int]
    in_size: int = 0
    has_bias: bool = False
    is_projection: bool = False
    layer: int | None = None
    norm: Norm | None = None
    is_scalar: bool = False

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())

    def num_bytes(self, dtype: torch.dtype) -> int:
        """In memory, where a scalar is a number."""
        if self.is_scalar:
            return 0
        is_wide = self.norm is not None and self.norm.is_wide
        item_bytes = (torch.float32 if is_wide else dtype).itemsize
        return self.num_rows * ((self.in_size or 1) + self.has_bias) * item_bytes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the file's tensors by name."""
        if self.is_scalar:
            return dict.fromkeys(self.rows, (1,))
        inner = (self.in_size,) if self.in_size else ()
        shapes: dict[str, tuple[int, ...]] = {}
        for name, size in self.rows.items():
            shapes[f"{name}.weight"] = (size, *inner)
            if self.has_bias:
                shapes[f"{name}.bias"] = (size,)
        return shapes


def parameters(decoder: Decoder) -> list[Parameter]:
    """Returns all parameters of a decoder, in order of use."""
    embedding = {EMBED_TOKENS: decoder.vocab_size}
    found = [Parameter("embedding", embedding, embedding, decoder.hidden_size)]
    if decoder.layer_inputs is not None:
        found += _layer_inputs_parameters(decoder.layer_inputs)
    for index, block in enumerate(decoder.blocks):
        found += _block_parameters(block, index)
    found.append(_norm_parameter("norm", decoder.final_norm.module, decoder.final_norm))
    if not decoder.head.is_tied:
        rows = {LM_HEAD: decoder.vocab_size}
        found.append(Parameter("head", rows, rows, decoder.hidden_size, is_projection=True))
    return found


def weights_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Returns what `load_weights` will take with plain projections, without allocating."""
    return sum(each.num_bytes(dtype) for each in parameters(decoder))


class Vector(NamedTuple):
    """A norm's weight or a bias of a projection, by the name that adapters have it under, and its
    tensor's in the checkpoint."""

    name: str
    tensor: str
    layer: int | None
    size: int


def vectors(decoder: Decoder) -> Iterator[Vector]:
    """Yields the model's vectors in order of use."""
    for parameter in parameters(decoder):
        if parameter.is_scalar:
            continue
        for name, size in parameter.members.items():
            if not parameter.in_size:
                yield Vector(name, f"{name}.weight", parameter.layer, size)
            elif parameter.has_bias:
                yield Vector(f"{name}.bias", f"{name}.bias", parameter.layer, size)


def unused(decoder: Decoder) -> frozenset[str]:
    """Returns the names of tensors that the checkpoint may have and that nothing reads."""
    blocks = enumerate(decoder.blocks)
    paths = (layer_path(layer, module) for layer, block in blocks for module in block.unused)
    return frozenset(f"{path}.{kind}" for path in paths for kind in ("weight", "bias"))


def _layer_inputs_parameters(layer_inputs: LayerInputs) -> Iterator[Parameter]:
    rows, size = {layer_inputs.embedding: layer_inputs.vocab_size}, layer_inputs.total_size
    yield Parameter("layer_embedding", rows, rows, size)
    yield _projection_parameter(layer_inputs.projection, lambda module: module)
    yield _norm_parameter("layer_inputs_norm", layer_inputs.norm.module, layer_inputs.norm)


def _block_parameters(block: Block, layer: int) -> Iterator[Parameter]:
    attention = block.attention

    def norms(*found: Norm | None) -> Iterator[Parameter]:
        for norm in found:
            if norm is not None and norm.module:
                path = layer_path(layer, norm.module)
                yield _norm_parameter(path, path, norm, layer)

    def projection(each: Projection) -> Parameter:
        return _projection_parameter(each, partial(layer_path, layer), layer)

    yield from norms(block.attention_norm)
    yield projection(attention.qkv)
    yield from norms(attention.q_norm, attention.k_norm, attention.v_norm)
    yield projection(attention.out)
    yield from norms(block.attention_post_norm, block.feed_forward_norm)
    yield projection(block.feed_forward.gate_up)
    yield projection(block.feed_forward.down)
    yield from norms(block.feed_forward_post_norm)
    if block.layer_input is not None:
        yield projection(block.layer_input.gate)
        yield projection(block.layer_input.out)
    yield from norms(block.layer_input_post_norm)
    if block.scalar:
        rows = {layer_path(layer, block.scalar): 1}
        yield Parameter(f"layers.{layer}.scalar", rows, rows, layer=layer, is_scalar=True)


def _norm_parameter(key: str, path: str, norm: Norm, layer: int | None = None) -> Parameter:
    return Parameter(key, {path: norm.size}, {path: norm.size}, layer=layer, norm=norm)


def _projection_parameter(
    projection: Projection, path_of: Callable[[str], str], layer: int | None = None
) -> Parameter:
    rows, members = (
        {path_of(module): size for module, size in modules}
        for modules in (projection.stored, projection.members)
    )
    key = projection.name if layer is None else f"layers.{layer}.{projection.name}"
    return Parameter(
        *(key, rows, members, projection.in_features, projection.has_bias),
        is_projection=True,
        layer=layer,
    )
