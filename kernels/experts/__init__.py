"""Mixtures of experts: the choice of a token's experts, and their outputs.

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
    "own_pairs",
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
    """Chooses each token's experts; see `reference.route`.

    Args:
        logits: The router's logits, float32 [T, experts].
        choice: How experts are chosen and weighed.
        bias: Added to scores for the choice only, float32 [experts].
        expert_scales: Factors of the weights, float32 [experts].
        out: Gets the experts, int32 [T, num_chosen]. None: a new tensor.

    Returns:
        The experts, int32 [T, num_chosen], and their weights, float32 [T, num_chosen].
    """
    if uses_triton(logits):
        from kernels.experts import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.route(logits, choice, bias, expert_scales, out)
    return reference.route(logits, choice, bias, expert_scales, out)


def sort_pairs(experts: Tensor, num_experts: int, order: Tensor | None = None) -> Pairs:
    """Sorts pairs of tokens and experts by expert; see `reference.sort_pairs`.

    Args:
        experts: int32 [T, num_chosen].
        num_experts: Number of experts.
        order: Order of tokens within an expert, integers [T]. None: as they come.
    """
    if uses_triton(experts):
        from kernels.experts import triton_ops

        return triton_ops.sort_pairs(experts, num_experts, order)
    return reference.sort_pairs(experts, num_experts, order)


def own_pairs(pairs: Pairs, experts: tuple[int, int]) -> Pairs:
    """Chooses the pairs of some experts; see `reference.own_pairs`.

    Args:
        pairs: The pairs of all experts.
        experts: The first expert, and the one behind the last.
    """
    if uses_triton(pairs.tokens):
        from kernels.experts import triton_ops

        return triton_ops.own_pairs(pairs, experts)
    return reference.own_pairs(pairs, experts)


def experts_linear(
    x: Tensor,
    weight: Tensor,
    pairs: Pairs,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Multiplies each pair's row by its expert's weight; see `reference.experts_linear`.

    Args:
        x: [P, in]; with `rows`, any number of rows.
        weight: [experts, out, in] of x's dtype. Experts and their rows may be apart.
        pairs: The pairs, in the order of experts.
        bias: [experts, out]. None: none.
        rows: Row of x for each pair, int64 [P]. None: row p for pair p.

    Returns:
        [P, out] of x's dtype.
    """
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
    """Sums each token's pairs by their weights; see `reference.combine`.

    Args:
        x: Outputs of the pairs, [P, size].
        pairs: The pairs.
        weights: float32 [T, num_chosen].
        shared: Outputs of the shared expert, [T, size]. None: there is none.
        shared_logits: Its gate before the sigmoid, float32 [T, 1]. None: the factor is 1.

    Returns:
        [T, size] of x's dtype.
    """
    if uses_triton(x):
        from kernels.experts import triton_ops

        return triton_ops.combine(x, pairs, weights, shared, shared_logits)
    return reference.combine(x, pairs, weights, shared, shared_logits)


def sizes_to_warm_up(
    max_tokens: int, num_experts: int, num_chosen: int, itemsize: int
) -> list[int]:
    """Returns numbers of tokens whose launches on a device are the launches of any number.

    Args:
        max_tokens: Most tokens of a step.
        num_experts: Number of experts.
        num_chosen: Experts per token.
        itemsize: Bytes of a weight's element.
    """
    from kernels.experts import triton_ops

    return triton_ops.sizes_to_warm_up(max_tokens, num_experts, num_chosen, itemsize)
