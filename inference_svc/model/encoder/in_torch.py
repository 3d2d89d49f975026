"""Encoders in torch: computes their operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from inference_svc.model.config.keys import names
from inference_svc.model.encoder.operations import Activate, AddInputs, AttendBothWays
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


COMPUTE: Mapping[type[Op], Callable[[Any, Step], Tensor]] = {
    Activate: _activate,
    AddInputs: _add_inputs,
    AttendBothWays: _attend,
    Gather: _gather,
}
"""Computes each operation that encoders alone have; `transformer.COMPUTE` has the others."""
