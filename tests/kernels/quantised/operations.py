"""The Triton products with quantised weights as tests/support/kernels/worker.py runs them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from kernels import tuning
from kernels.experts import Pairs
from kernels.quantised import (
    Activations,
    Codes,
    QuantisedRows,
    QuantisedWeight,
    WeightFormat,
    triton_kernels,
    triton_ops,
)
from kernels.quantised.reference import int8_inputs
from tests.support.kernels.worker import CompileOnly, NoDevice

Form = tuple[str, int, bool, str, str]
"""The fields of a format: a request has no enums of modules that the worker has loaded anew."""
Constants = dict[str, dict[str, int]]


def form_of(fields: Form) -> WeightFormat:
    codes, group_size, has_offsets, scales, activations = fields
    return WeightFormat(Codes(codes), group_size, has_offsets, scales, Activations(activations))


def weight_of(fields: Form, tensors: list[torch.Tensor | None]) -> QuantisedWeight:
    codes, scales, offsets = tensors
    assert codes is not None
    assert scales is not None
    rows = QuantisedRows(form_of(fields), codes, scales, offsets)
    weight = QuantisedWeight.empty(rows.format, *codes.shape, torch.device("cpu"))
    weight.put_rows(0, rows)
    return weight


def overridden(constants: Constants | None) -> ExitStack:
    stack = ExitStack()
    for kernel, changed in (constants or {}).items():
        stack.enter_context(tuning.overridden(kernel, **changed))
    return stack


def linear(
    fields: Form,
    tensors: list[torch.Tensor | None],
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    constants: Constants | None = None,
) -> torch.Tensor:
    with overridden(constants):
        return triton_ops.linear(x, weight_of(fields, tensors), bias, dtype)


def experts_linear(
    fields: Form,
    tensors: list[torch.Tensor | None],
    x: torch.Tensor,
    pairs: Pairs,
    bias: torch.Tensor | None,
    step: int,
    out_features: int,
    constants: Constants | None = None,
) -> torch.Tensor:
    weight = weight_of(fields, tensors)
    with overridden(constants):
        return triton_ops.experts_linear(x, weight, pairs, bias, step, out_features)


def rounded_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    form = WeightFormat(Codes.INT8, activations=Activations.INT8)
    weight = QuantisedWeight.empty(form, 1, x.shape[1], torch.device("cpu"))
    codes, scales = triton_ops._inputs(x, weight)
    assert scales is not None
    return codes, scales


def defined_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return int8_inputs(x)


def compile_launches(
    capability: int, fields: Form, dtype: torch.dtype, num_rows: int
) -> dict[str, Any]:
    """Launches of a product of an 8B model's width, compiled for sm_`capability`."""
    from triton.runtime import driver

    driver.set_active(NoDevice(capability))
    kernels = {k: v for k, v in vars(triton_kernels).items() if k.endswith("_kernel")}
    launches = {name: CompileOnly(kernel) for name, kernel in kernels.items()}
    vars(triton_kernels).update(launches)
    try:
        weight = QuantisedWeight.empty(form_of(fields), 2048, 4096, torch.device("cpu"))
        triton_ops.linear(torch.zeros(num_rows, 4096, dtype=dtype), weight)
    finally:
        vars(triton_kernels).update(kernels)
    return {name: launch.compiled[0] for name, launch in launches.items() if launch.compiled}


class Recorded:
    """A kernel whose launches compile nothing: their constants are kept."""

    def __init__(self) -> None:
        self.constants: set[frozenset[tuple[str, Any]]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.constants.add(frozenset(constants.items()))


def num_launched(fields: Form, steps: list[int], num_experts: int, num_chosen: int) -> int:
    """Returns the number of different launches of experts' products in steps of so many tokens."""
    recorded, kernel = Recorded(), triton_kernels.many_rows_kernel
    vars(triton_kernels)["many_rows_kernel"] = recorded
    try:
        weight = QuantisedWeight.empty(form_of(fields), 8 * num_experts, 64, torch.device("cpu"))
        for num_pairs in (num_chosen * each for each in steps):
            starts = torch.zeros(num_experts + 1, dtype=torch.int32)
            tokens = torch.zeros(num_pairs, dtype=torch.int32)
            pairs = Pairs(tokens, starts, tokens)
            x = torch.zeros(num_pairs, 64, dtype=torch.bfloat16)
            triton_ops.experts_linear(x, weight, pairs, None, 8, 8)
    finally:
        vars(triton_kernels)["many_rows_kernel"] = kernel
    return len(recorded.constants)


def sizes_to_warm_up(fields: Form, *args: int) -> list[int]:
    return triton_ops.sizes_to_warm_up(*args, form_of(fields))


def compile_ptx(*args: Any) -> dict[str, str]:
    return {name: kernel.asm["ptx"] for name, kernel in compile_launches(*args).items()}


OPERATIONS = {
    f.__name__: f
    for f in (
        *(linear, experts_linear, rounded_inputs, defined_inputs, compile_ptx),
        *(num_launched, sizes_to_warm_up),
    )
}
