"""The definition of products with quantised weights: dequantise, then multiply."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantised.formats import Activations
from kernels.quantised.rows import QuantisedRows

_TINY = torch.finfo(torch.float32).tiny


def linear(
    x: Tensor, weight: QuantisedRows, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """out[t] = x[t] @ W^T + bias with the dequantised W, in fp32, rounded once.

    Inputs that the format rounds to INT8 are rounded first.

    Args:
        x: [T, in].
        weight: All rows of W [out, in].
        bias: [out]. None: none.
        dtype: The dtype of the result. None: x's.

    Returns:
        [T, out].
    """
    inputs = x.float()
    if weight.format.activations is Activations.INT8:
        codes, scales = int8_inputs(x)
        inputs = codes.float() * scales[:, None]
    sums = F.linear(inputs, weight.dequantise(), None if bias is None else bias.float())
    return sums.to(dtype or x.dtype)


def int8_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds x [T, in] to int8 [T, in] with one scale for each token, fp32 [T]: its largest
    magnitude is 127."""
    wide = x.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp_(min=_TINY)
    return (wide / scales[:, None]).round_().to(torch.int8), scales
