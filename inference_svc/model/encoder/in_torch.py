"""Encoders in torch: computes their operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.config.keys import names
from inference_svc.model.encoder.clips import Clip, Join
from inference_svc.model.encoder.operations import (
    Activate,
    AddInputs,
    ArrangeHeads,
    AttendBothWays,
    RotateHeads,
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
from kernels.pictures.reference import (
    add_blend,
    arrange_heads,
    by_pixel,
    clip,
    merge_patches,
    standardise,
)

OF_ENCODERS = names(
    """
    decoder.encoder decoder.final_norm=none encoder_inputs encoder_inputs.positions
    encoder_inputs.num_token_types both_ways both_ways.rope both_ways.reach dense.is_gated
    dense.activation=gelu block.attention_sum_norm block.feed_forward_sum_norm norm.has_bias
    """
)
"""The features of encoders alone, which torch computes."""

OF_PICTURES = names("decoder.pictures rope.axes")
"""The features of decoders that read pictures. Towers need none: torch computes all of them."""


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
        add_blend(out, tables[op.positions.key], blend.rows, blend.weights)
    elif op.positions is not None:
        rows = step.inputs.positions + op.first_row
        out += tables[op.positions.key].index_select(0, rows)
    return out


def _rotate(op: RotateHeads, step: Step) -> Tensor:
    qkv: Tensor = step.values[op.out]
    cos, sin = step.values[op.inputs[1]]
    heads = qkv[:, : 2 * op.mixer.size].unflatten(1, (-1, op.mixer.head_dim))
    heads.copy_(rotate(heads, cos, sin))
    return qkv


def _attend(op: AttendBothWays, step: Step) -> Tensor:
    """A tower's windows are of the step's part of a tile."""
    mixer, part = op.mixer, step.inputs.part
    heads = step.values[op.inputs[0]].unflatten(1, (3, mixer.num_heads, mixer.head_dim))
    own = heads if part is None else heads[part]
    q, k, v = own.unbind(1)
    mixed = both_ways.attend(q, k, v, step.inputs.attention, mixer.scale, mixer.reach)
    return mixed.flatten(1)


def _arrange_heads(op: ArrangeHeads, step: Step) -> Tensor:
    qkv: Tensor = step.values[op.out]
    weights = []
    for described in op.norms:
        norm = step.norm(described, op.layer, Rows.TOKENS)
        assert norm is not None
        weights.append(norm.weight)
    arrange_heads(qkv, weights, op.norms[0].eps, op.mixer.quarters)
    return qkv


def _clip(op: Clip, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    # Numbers of a device's memory would have to be waited for.
    return clip(x, *(step.weights.numbers[each.name] for each in (op.least, op.most)))


def _join(op: Join, step: Step) -> Tensor:
    return torch.cat([step.values[each] for each in op.inputs], 1)


def _activate(op: Activate, step: Step) -> Tensor:
    return activate(step.values[op.inputs[0]], op.activation)


def _gather(op: Gather, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    return torch.index_select(x, 0, step.rows)


def _embed_patches(op: EmbedPatches, step: Step) -> Tensor:
    """[tokens, size]"""
    patches, weights = step.inputs.patches, step.weights
    assert patches is not None, "a tower's first step has patches"
    kernel = op.kernel(weights.numbers[op.weight.name])
    made = F.linear(patches.flatten(1), kernel, weights.numbers_of(op.bias))
    token = weights.numbers_of(op.class_token)
    if token is not None and step.inputs.part is not None and not step.inputs.part.start:
        made = torch.cat((token[None], made))
    return made.to(step.dtype)


def _read_patches(op: ReadPatches, step: Step) -> Tensor:
    """[patches, side * side * 3]"""
    patches = step.inputs.patches
    assert patches is not None, "a tower's first step has patches"
    return by_pixel(patches, step.dtype)


def _merge_patches(op: MergePatches, step: Step) -> Tensor:
    return merge_patches(step.values[op.inputs[0]], op.count, op.merging)


def _standardise(op: Standardise, step: Step) -> Tensor:
    x: Tensor = step.values[op.out]
    bias, factor = (step.weights.numbers_of(each) for each in (op.bias, op.factor))
    return standardise(x, op.standard.scale, bias, factor)


def _place_pictures(op: PlacePictures, step: Step) -> Tensor:
    out: Tensor = step.values[op.out]
    for start, rows in step.inputs.pictures:
        out[start : start + len(rows)] = rows[:, : op.out.width]
    if step.inputs.masked is not None:
        step.inputs.masked.put(out)
    return out


def _add_pictures(op: AddPictures, step: Step) -> Tensor:
    out: Tensor = step.values[op.out]
    for placed in step.inputs.pictures:
        rows = placed.of_tap(op.tap, op.out.width)
        out[placed.start : placed.start + len(rows)] += rows
    if step.inputs.masked is not None:
        step.inputs.masked.add(out, op.tap)
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
    RotateHeads: _rotate,
    Standardise: _standardise,
}
"""Computes each operation that encoders alone have; `transformer.COMPUTE` has the others."""
