"""Mixtures of experts: what a token's experts make of it, and which they are.

The functions below run `reference` and `cpu` on CPUs and `triton_ops` on CUDA.

cpu        products tensor by tensor
native     the operations in C++, for programs, at fixed addresses
reference  the definitions: plain torch, fp32
"""

from __future__ import annotations

from torch import Tensor

from kernels.experts import cpu
from kernels.experts.reference import (
    MAX_EXPERTS,
    Choice,
    Pairs,
    Routing,
    Scoring,
    combine,
    route,
    sort_pairs,
)

__all__ = [
    "MAX_EXPERTS",
    "Choice",
    "Pairs",
    "Routing",
    "Scoring",
    "combine",
    "experts_linear",
    "route",
    "sort_pairs",
]


def experts_linear(x: Tensor, weight: Tensor, pairs: Pairs, bias: Tensor | None = None) -> Tensor:
    """See `reference.experts_linear`."""
    return cpu.experts_linear(x, weight, pairs, bias)
