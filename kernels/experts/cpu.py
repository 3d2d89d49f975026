"""Mixtures of experts on the CPU, tensor by tensor: one product per expert that has rows."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from kernels.experts.reference import Pairs


def experts_linear(
    x: Tensor,
    weight: Tensor,
    pairs: Pairs,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Computes `reference.experts_linear`: x [P, in] (with rows int64 [P], any number of rows),
    weight [experts, out, in] and bias [experts, out] give [P, out]."""
    out = x.new_empty(len(x if rows is None else rows), weight.shape[1])
    starts = pairs.starts.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            own = x[start:end] if rows is None else x[rows[start:end]]
            out[start:end] = F.linear(own, weight[expert], None if bias is None else bias[expert])
    return out
