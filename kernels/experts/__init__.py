"""Mixtures of experts: what a token's experts make of it, and which they are.

The functions below run `reference` and `cpu` on CPUs and `triton_ops` on CUDA.

cpu             products tensor by tensor
native          the operations in C++, for programs, at fixed addresses
reference       the definitions: plain torch, fp32
triton_kernels  the Triton kernels: routing, pairs in the order of experts, products, sums
triton_ops      their launches; grids follow from sizes alone
"""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.experts import cpu, reference
from kernels.experts.reference import (
    MAX_EXPERTS,
    Choice,
    Pairs,
    Routing,
    Scoring,
    padded_rows,
)

__all__ = [
    "MAX_EXPERTS",
    "Choice",
    "Pairs",
    "Routing",
    "Scoring",
    "combine",
    "experts_linear",
    "padded_rows",
    "route",
    "sizes_to_warm_up",
    "sort_pairs",
]


def route(
    logits: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Routing:
    """See `reference.route`."""
    if uses_triton(logits):
        from kernels.experts import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.route(logits, choice, bias, expert_scales, out)
    return reference.route(logits, choice, bias, expert_scales, out)


def sort_pairs(experts: Tensor, num_experts: int, order: Tensor | None = None) -> Pairs:
    """See `reference.sort_pairs`."""
    if uses_triton(experts):
        from kernels.experts import triton_ops

        return triton_ops.sort_pairs(experts, num_experts, order)
    return reference.sort_pairs(experts, num_experts, order)


def experts_linear(
    x: Tensor,
    weight: Tensor,
    pairs: Pairs,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """See `reference.experts_linear`; experts and their rows may be apart."""
    if uses_triton(x):
        from kernels.experts import triton_ops

        return triton_ops.experts_linear(x, weight, pairs, bias, rows)
    return cpu.experts_linear(x, weight, pairs, bias, rows)


def combine(
    x: Tensor,
    pairs: Pairs,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
) -> Tensor:
    """See `reference.combine`."""
    if uses_triton(x):
        from kernels.experts import triton_ops

        return triton_ops.combine(x, pairs, weights, shared, shared_logits)
    return reference.combine(x, pairs, weights, shared, shared_logits)


def sizes_to_warm_up(
    max_tokens: int, num_experts: int, num_chosen: int, itemsize: int
) -> list[int]:
    """Returns numbers of tokens, up to `max_tokens`, that launch on a device whatever any number
    launches."""
    from kernels.experts import triton_ops

    return triton_ops.sizes_to_warm_up(max_tokens, num_experts, num_chosen, itemsize)
