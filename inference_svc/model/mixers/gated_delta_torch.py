"""The gated delta rule in torch: computes its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.mixers.gated_delta import Convolve, DeltaRule, GatedNorm
from inference_svc.model.operations import Op, Rows
from inference_svc.model.step import Step
from kernels import recurrence


def _convolve(op: Convolve, step: Step) -> Tensor:
    (states, _), segments = step.states(op)
    kernels = step.weights.numbers_of(op.kernels)
    assert kernels is not None
    size = op.mixer.conv_size
    x = step.values[op.inputs[0]][:, :size]
    return recurrence.causal_conv(x, kernels.view(size, -1), states, segments)


def _delta_rule(op: DeltaRule, step: Step) -> Tensor:
    mixer, (_, states), segments = op.mixer, *step.states(op)
    qkv, made = (step.values[each] for each in op.inputs)
    q, k, v = qkv.split((mixer.key_size, mixer.key_size, mixer.value_size), dim=1)
    *_, b, a = made.split(mixer.parts, dim=1)
    rate, bias = (step.weights.numbers_of(each) for each in (op.decay, op.decay_bias))
    assert rate is not None
    mixed = recurrence.gated_delta(
        q.unflatten(1, (mixer.num_key_heads, -1)),
        k.unflatten(1, (mixer.num_key_heads, -1)),
        v.unflatten(1, (mixer.num_value_heads, -1)),
        -rate.exp() * F.softplus(a.float() + bias),
        torch.sigmoid(b),
        states,
        segments,
    )
    return mixed.flatten(1).to(qkv.dtype)


def _gated_norm(op: GatedNorm, step: Step) -> Tensor:
    mixer, norm = op.mixer, step.norm(op.mixer.norm, op.layer, Rows.TOKENS)
    x, made = (step.values[each] for each in op.inputs)
    assert norm is not None
    _, z, *_ = made.split(mixer.parts, dim=1)
    x, z = (each.unflatten(1, (mixer.num_value_heads, -1)) for each in (x, z))
    return recurrence.gated_norm(x, z, norm.weight, norm.eps).flatten(1)


COMPUTE: Mapping[type[Op], Callable[[Any, Step], object]] = {
    Convolve: _convolve,
    DeltaRule: _delta_rule,
    GatedNorm: _gated_norm,
}
"""Its part of `transformer.COMPUTE`."""
