"""The gated short convolution in torch: computes its operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from inference_svc.model.mixers.short_conv import GatedConvolve
from inference_svc.model.operations import Op
from inference_svc.model.step import Step
from kernels import recurrence


def _gated_convolve(op: GatedConvolve, step: Step) -> Tensor:
    (states,), segments = step.states(op)
    kernels = step.weights.numbers_of(op.kernels)
    assert kernels is not None
    x: Tensor = step.values[op.inputs[0]]
    return recurrence.gated_conv(x, kernels.view(op.mixer.num_channels, -1), states, segments)


COMPUTE: Mapping[type[Op], Callable[[Any, Step], object]] = {GatedConvolve: _gated_convolve}
"""Its part of `transformer.COMPUTE`."""
