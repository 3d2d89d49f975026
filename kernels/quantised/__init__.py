"""Weights in few bits: their formats, and products with them.

formats    the meaning of codes, and the shape of their scales
rows       rows of a weight as codes with scales, in which all checkpoint formats agree
quantise   makes such rows of plain weights, by rounding to nearest
weight     a weight as it lies in memory for torch and Triton
cpu        products in torch on the CPU, block by block
pack       weights in the order in which `src/quantised.cpp` reads them
native     products in C++: for programs, at fixed addresses, and over tensors
reference  the definition: dequantise, then multiply

The functions below run `cpu` on CPUs, and on CUDA:

split           how products with few rows are cut into programs
triton_kernels  the Triton kernels: few rows, many rows, experts
triton_ops      their launches; grids follow from sizes alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.experts import Pairs
from kernels.quantised import cpu
from kernels.quantised.formats import Activations, Codes, WeightFormat
from kernels.quantised.quantise import quantise
from kernels.quantised.rows import QuantisedRows
from kernels.quantised.split import inputs_bytes, workspace_bytes
from kernels.quantised.weight import QuantisedWeight

__all__ = [
    "Activations",
    "Codes",
    "QuantisedRows",
    "QuantisedWeight",
    "WeightFormat",
    "experts_linear",
    "implementation",
    "inputs_bytes",
    "linear",
    "quantise",
    "sizes_to_warm_up",
    "workspace_bytes",
]

DEQUANTISED = "dequantised"


def implementation(form: WeightFormat, device: str) -> str:
    """Names the code of the functions below for a format: a kernel, or "dequantised", which torch
    multiplies after it has dequantised it.

    Args:
        form: The format of a weight.
        device: "cuda" or "cpu".
    """
    if device != "cuda":
        return DEQUANTISED
    input_bits = 8 if form.activations is Activations.INT8 else 16
    return f"triton W{form.codes.num_bits}A{input_bits}"


def linear(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies by a quantised weight; see `reference.linear`.

    Args:
        x: [T, in].
        weight: [out, in].
        bias: [out], of x's dtype. None: none.
        dtype: The dtype of the result: x's, or fp32. None: x's.

    Returns:
        [T, out].
    """
    if uses_triton(x):
        from kernels.quantised import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.linear(x, weight, bias, dtype)
    return cpu.linear(x, weight, bias, dtype)


def experts_linear(
    x: Tensor,
    weight: QuantisedWeight,
    pairs: Pairs,
    bias: Tensor | None,
    step: int,
    out_features: int,
) -> Tensor:
    """Multiplies each pair's row by its expert's weight; see `kernels.experts.experts_linear`.

    Args:
        x: [P, in].
        weight: The weights of all experts, whose rows begin every `step`.
        pairs: The pairs, in the order of experts.
        bias: [experts, out_features]. None: none.
        step: Rows from the first of an expert to the first of the next.
        out_features: Rows of an expert.

    Returns:
        [P, out_features] of x's dtype.
    """
    if uses_triton(x):
        from kernels.quantised import triton_ops

        return triton_ops.experts_linear(x, weight, pairs, bias, step, out_features)
    return cpu.experts_linear(x, weight, pairs, bias, step, out_features)


def sizes_to_warm_up(
    max_tokens: int, num_experts: int, num_chosen: int, itemsize: int, form: WeightFormat
) -> list[int]:
    """Returns numbers of tokens whose launches of `experts_linear` on a device are the launches of
    any number.

    Args:
        max_tokens: Most tokens of a step.
        num_experts: Number of experts.
        num_chosen: Experts per token.
        itemsize: Bytes of an input's element.
        form: The format of the weights.
    """
    from kernels.quantised import triton_ops

    return triton_ops.sizes_to_warm_up(max_tokens, num_experts, num_chosen, itemsize, form)
