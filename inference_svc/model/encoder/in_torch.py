"""Encoders in torch: computes their operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.config.keys import names
from inference_svc.model.description import Merging
from inference_svc.model.encoder.clips import Clip, Join
from inference_svc.model.encoder.operations import (
    Activate,
    AddInputs,
    ArrangeHeads,
    AttendBothWays,
)
from inference_svc.model.encoder.towers import (
    AddPictures,
    EmbedPatches,
    MergePatches,
    PlacePictures,
    ReadPatches,
    Standardise,
)
from inference_svc.model.layers import activate
from inference_svc.model.operations import Gather, Op, Rows
from inference_svc.model.step import Step
from kernels.attention import both_ways
from kernels.attention.reference import rotate
from kernels.elementwise import rms_norm

OF_ENCODERS = names(
    """
    decoder.encoder decoder.final_norm=none encoder_inputs encoder_inputs.positions
    encoder_inputs.num_token_types both_ways both_ways.rope both_ways.reach dense.is_gated
    dense.activation=gelu block.attention_sum_norm block.feed_forward_sum_norm norm.has_bias
    """
)
"""The features of encoders alone, which torch computes."""

OF_PICTURES = names("decoder.pictures rope.axes")
"""The features of decoders that read pictures. Torch computes the towers themselves."""


def _add_inputs(op: AddInputs, step: Step) -> Tensor:
    out: Tensor = step.values[op.out]
    tables = step.weights.tables
    if op.types is not None:
        table, types = tables[op.types.key], step.inputs.types
        if types is None or len(table) == 1:
            out += table[0]
        else:
            out += table.index_select(0, types)
    if op.positions is not None and op.are_blended:
        blend = step.inputs.blend
        assert blend is not None, "a tower's first step has it"
        found = tables[op.positions.key][blend.rows] * blend.weights[:, :, None]
        out += found.sum(1).to(out.dtype)
    elif op.positions is not None:
        rows = step.inputs.positions + op.first_row
        out += tables[op.positions.key].index_select(0, rows)
    return out


def _attend(op: AttendBothWays, step: Step) -> Tensor:
    mixer, qkv = op.mixer, step.values[op.inputs[0]]
    angles = None if op.angles is None else step.values[op.angles]
    every, part = slice(None), step.inputs.part
    queries, keys = every if part is None else part, every
    if part is not None and mixer.in_windows:
        keys = part
    heads = qkv.unflatten(1, (3, mixer.num_heads, mixer.head_dim))
    q, k, v = heads[queries, 0], heads[keys, 1], heads[keys, 2]
    if angles is not None:
        cos, sin = angles
        q = rotate(q, cos[queries], sin[queries])
        k = rotate(k, cos[keys], sin[keys])
    if part is not None and not mixer.in_windows:
        return both_ways.attend_all(q, k, v, mixer.scale).flatten(1)
    mixed = both_ways.attend(q, k, v, step.inputs.attention, mixer.scale, mixer.reach)
    return mixed.flatten(1)


def _arrange_heads(op: ArrangeHeads, step: Step) -> Tensor:
    qkv: Tensor = step.values[op.out]
    mixer, quarters = op.mixer, op.mixer.quarters
    heads = qkv.unflatten(1, (3, mixer.num_heads, mixer.head_dim))
    assert mixer.head_norms is not None
    for kind, described in enumerate(mixer.head_norms):
        norm = step.norm(described, op.layer, Rows.TOKENS)
        assert norm is not None
        normed = rms_norm(heads[:, kind].reshape(-1, mixer.head_dim), norm)
        if quarters is not None and kind < 2:
            normed = normed.unflatten(1, (4, -1))[:, list(quarters)].flatten(1)
        heads[:, kind] = normed.view_as(heads[:, kind])
    return qkv


def _clip(op: Clip, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    least, most = (float(step.weights.numbers[each.name]) for each in (op.least, op.most))
    return x.clamp(least, most)


def _join(op: Join, step: Step) -> Tensor:
    return torch.cat([step.values[each] for each in op.inputs], 1)


def _activate(op: Activate, step: Step) -> Tensor:
    return activate(step.values[op.inputs[0]], op.activation)


def _gather(op: Gather, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    return torch.index_select(x, 0, step.rows)


def _embed_patches(op: EmbedPatches, step: Step) -> Tensor:
    """[tokens, size]. The convolution is a product, because patches do not overlap; of frames that
    are equal it is one with the sum of their kernels."""
    patches, weights = step.inputs.patches, step.weights
    assert patches is not None, "a tower's first step has patches"
    kernel = weights.numbers[op.weight.name].view(op.weight.shape)
    if op.patches.form.frames > 1:
        kernel = kernel.sum(2)
    made = F.linear(patches.flatten(1), kernel.flatten(1), weights.numbers_of(op.bias))
    token = weights.numbers_of(op.class_token)
    if token is not None:
        made = torch.cat((token[None], made))
    return made.to(step.dtype)


def _read_patches(op: ReadPatches, step: Step) -> Tensor:
    """[patches, side * side * 3]"""
    patches = step.inputs.patches
    assert patches is not None, "a tower's first step has patches"
    return patches.permute(0, 2, 3, 1).flatten(1).to(step.dtype)


def _merge_patches(op: MergePatches, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    cells = x.view(-1, op.count, x.shape[1])
    if op.merging is Merging.MEAN:
        return cells.float().mean(1).to(x.dtype)
    if op.merging is Merging.TAKING_TURNS:
        cells = cells.transpose(1, 2)
    return cells.reshape(-1, op.out.width)


def _standardise(op: Standardise, step: Step) -> Tensor:
    x: Tensor = step.values[op.out]
    scaled = x.float() * op.standard.scale
    bias, factor = (step.weights.numbers_of(each) for each in (op.bias, op.factor))
    if bias is not None and factor is not None:
        scaled = (scaled - bias) * factor
    return scaled.to(x.dtype)


def _place_pictures(op: PlacePictures, step: Step) -> Tensor:
    out: Tensor = step.values[op.out]
    for start, rows in step.inputs.pictures:
        out[start : start + len(rows)] = rows[:, : op.out.width]
    return out


def _add_pictures(op: AddPictures, step: Step) -> Tensor:
    out: Tensor = step.values[op.out]
    for placed in step.inputs.pictures:
        rows = placed.of_tap(op.tap, op.out.width)
        out[placed.start : placed.start + len(rows)] += rows
    return out


COMPUTE: Mapping[type[Op], Callable[[Any, Step], Tensor]] = {
    Activate: _activate,
    AddPictures: _add_pictures,
    AddInputs: _add_inputs,
    ArrangeHeads: _arrange_heads,
    AttendBothWays: _attend,
    Clip: _clip,
    EmbedPatches: _embed_patches,
    Gather: _gather,
    Join: _join,
    MergePatches: _merge_patches,
    PlacePictures: _place_pictures,
    ReadPatches: _read_patches,
    Standardise: _standardise,
}
"""Computes each operation that encoders alone have; `transformer.COMPUTE` has the others."""
