"""The mixers in torch: computes their operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from inference_svc.model.mixers.gated_delta import Convolve, DeltaRule, GatedNorm
from inference_svc.model.mixers.short_conv import GatedConvolve
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
    *_, b, a = made.split(mixer.parts, dim=1)
    rate, bias = (step.weights.numbers_of(each) for each in (op.decay, op.decay_bias))
    assert rate is not None
    assert bias is not None
    return recurrence.delta_rule(qkv, b, a, rate, bias, states, segments, mixer.heads)


def _gated_norm(op: GatedNorm, step: Step) -> Tensor:
    mixer, norm = op.mixer, step.norm(op.mixer.norm, op.layer, Rows.TOKENS)
    x, made = (step.values[each] for each in op.inputs)
    assert norm is not None
    _, z, *_ = made.split(mixer.parts, dim=1)
    x, z = (each.unflatten(1, (mixer.num_value_heads, -1)) for each in (x, z))
    return recurrence.gated_norm(x, z, norm.weight, norm.eps).flatten(1)


def _gated_convolve(op: GatedConvolve, step: Step) -> Tensor:
    (states,), segments = step.states(op)
    kernels = step.weights.numbers_of(op.kernels)
    assert kernels is not None
    x: Tensor = step.values[op.inputs[0]]
    return recurrence.gated_conv(x, kernels.view(op.mixer.num_channels, -1), states, segments)


COMPUTE: Mapping[type[Op], Callable[[Any, Step], object]] = {
    Convolve: _convolve,
    DeltaRule: _delta_rule,
    GatedConvolve: _gated_convolve,
    GatedNorm: _gated_norm,
}
"""Their part of `transformer.COMPUTE`."""
