"""Weights of the base that adapters have of their own: rows of an embedding or a head, all of it,
or a norm's.

The functions below run `reference` on CPUs and `triton_ops` on CUDA. They compute what tokens of
adapters that have such a weight get in place of what the base has made; others stay as they are.

native          the operations in C++, for programs
reference       the definitions, in torch, segment by segment
triton_kernels  the Triton kernels: positions, and whether there is anything, are read on the device
triton_ops      their launches
"""

from __future__ import annotations

import torch

from kernels.dispatch import uses_triton
from kernels.lora import LoraPlan, LoraTable
from kernels.replaced import reference

__all__ = ["replace_embeddings", "replace_logits", "token_weights"]


def token_weights(
    weight: torch.Tensor, table: LoraTable, plan: LoraPlan, index: int, offset: float = 0.0
) -> torch.Tensor:
    """See `reference.token_weights`."""
    if uses_triton(weight):
        from kernels.replaced import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.token_weights(weight, table, plan, index, offset)
    return reference.token_weights(weight, table, plan, index, offset)


def replace_embeddings(
    out: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, index: int
) -> None:
    """See `reference.replace_embeddings`."""
    if uses_triton(out):
        from kernels.replaced import triton_ops

        triton_ops.replace_embeddings(out, token_ids, table, plan, index)
    else:
        reference.replace_embeddings(out, token_ids, table, plan, index)


def replace_logits(
    out: torch.Tensor,
    x: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    index: int,
    vocab_size: int,
) -> None:
    """See `reference.replace_logits`."""
    if uses_triton(out):
        from kernels.replaced import triton_ops

        triton_ops.replace_logits(out, x, table, plan, index, vocab_size)
    else:
        reference.replace_logits(out, x, table, plan, index, vocab_size)
