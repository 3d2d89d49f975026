"""Encoders in torch: computes their operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.config.keys import names
from inference_svc.model.encoder.operations import Activate, AddInputs, AttendBothWays
from inference_svc.model.encoder.towers import EmbedPatches, MergePatches, PlacePictures
from inference_svc.model.layers import activate
from inference_svc.model.operations import Gather, Op
from inference_svc.model.step import Step
from kernels.attention import both_ways
from kernels.attention.reference import rotate

OF_ENCODERS = names(
    """
    decoder.encoder decoder.final_norm=none encoder_inputs encoder_inputs.positions
    encoder_inputs.num_token_types both_ways both_ways.rope both_ways.reach dense.is_gated
    dense.activation=gelu block.attention_sum_norm block.feed_forward_sum_norm norm.has_bias
    """
)
"""The features of encoders alone, which torch computes."""

OF_PICTURES = names("decoder.pictures")
"""The features of decoders that read pictures. Torch computes the towers themselves."""


def _add_inputs(op: AddInputs, step: Step) -> Tensor:
    out: Tensor = step.values[op.out]
    tables = step.weights.tables
    if op.types is not None:
        out += tables[op.types.key][0]
    if op.positions is not None:
        rows = step.inputs.positions + op.first_row
        out += tables[op.positions.key].index_select(0, rows)
    return out


def _attend(op: AttendBothWays, step: Step) -> Tensor:
    mixer, qkv = op.mixer, step.values[op.inputs[0]]
    heads = qkv.unflatten(1, (3, mixer.num_heads, mixer.head_dim))
    q, k, v = heads.unbind(1)
    if op.angles is not None:
        cos, sin = step.values[op.angles]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    mixed = both_ways.attend(q, k, v, step.inputs.attention, mixer.scale, mixer.reach)
    return mixed.flatten(1)


def _activate(op: Activate, step: Step) -> Tensor:
    return activate(step.values[op.inputs[0]], op.activation)


def _gather(op: Gather, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    return torch.index_select(x, 0, step.rows)


def _embed_patches(op: EmbedPatches, step: Step) -> Tensor:
    """[tiles * tokens, size]. The convolution is a product, because patches do not overlap."""
    pixels = step.inputs.pixels
    assert pixels is not None, "a tower's step has tiles"
    weights, patch = step.weights, op.patches.patch_size
    kernel = weights.numbers[op.weight.name].view(op.out.width, -1)
    side = op.patches.tile_size // patch * patch  # a convolution drops the rest of a tile, too
    rows = pixels[:, :, :side, :side].unflatten(2, (-1, patch)).unflatten(4, (-1, patch))
    rows = rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    made = F.linear(rows, kernel, weights.numbers_of(op.bias))
    token = weights.numbers_of(op.class_token)
    if token is not None:
        made = torch.cat((token.expand(len(made), 1, -1), made), 1)
    return made.flatten(0, 1).to(step.dtype)


def _merge_patches(op: MergePatches, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    pixels = step.inputs.pixels
    assert pixels is not None, "a tower's step has tiles"
    num_per_tile, merge = len(x) // len(pixels), op.merge
    side = round(num_per_tile**0.5) // merge
    grid = x.view(len(pixels), side, merge, side, merge, -1)
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(len(x) // merge**2, op.out.width)


def _place_pictures(op: PlacePictures, step: Step) -> Tensor:
    out: Tensor = step.values[op.out]
    for placed in step.inputs.pictures:
        out[placed.start : placed.start + len(placed.rows)] = placed.rows
    return out


COMPUTE: Mapping[type[Op], Callable[[Any, Step], Tensor]] = {
    Activate: _activate,
    AddInputs: _add_inputs,
    AttendBothWays: _attend,
    EmbedPatches: _embed_patches,
    Gather: _gather,
    MergePatches: _merge_patches,
    PlacePictures: _place_pictures,
}
"""Computes each operation that encoders alone have; `transformer.COMPUTE` has the others."""
