"""Products with quantised weights in torch: block by block dequantised, then multiplied."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts.reference import Pairs
from kernels.quantised.formats import Activations
from kernels.quantised.reference import int8_inputs
from kernels.quantised.weight import QuantisedWeight


def linear(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes `reference.linear` of x [T, in]: [T, out] of `dtype`. The weight is rounded to x's
    dtype where the result has that."""
    wide = dtype or x.dtype
    x = _inputs(x, weight).to(wide)
    out = x.new_empty(len(x), len(weight.codes), dtype=wide)
    for start, rows in weight.blocks():
        end = start + len(rows)
        own = None if bias is None else bias[start:end].to(wide)
        out[:, start:end] = F.linear(x, rows.to(wide), own)
    return out


def experts_linear(
    x: Tensor,
    weight: QuantisedWeight,
    pairs: Pairs,
    bias: Tensor | None,
    step: int,
    out_features: int,
) -> Tensor:
    """Computes `kernels.experts.experts_linear` with a quantised weight: x [P, in] of a float
    dtype gives [P, out_features] of this dtype. The rows of an expert begin `step` behind the ones
    of the expert before it; bias: [experts, out_features]."""
    out = x.new_empty(len(x), out_features)
    x = _inputs(x, weight).to(x.dtype)
    for expert, (start, end) in enumerate(pairwise(pairs.starts.tolist())):
        if start < end:
            first = expert * step
            rows = weight.rows(first, first + out_features).dequantise().to(x.dtype)
            out[start:end] = F.linear(x[start:end], rows, None if bias is None else bias[expert])
    return out


def _inputs(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """Returns the inputs as the format has them."""
    if weight.format.activations is Activations.EXACT:
        return x
    codes, scales = int8_inputs(x)
    return codes.float() * scales[:, None]
