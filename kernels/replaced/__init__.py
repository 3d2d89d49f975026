"""Base weights that adapters replace: rows of an embedding or head, all of it, or a norm's weight.

The functions below run `reference` on CPUs and `triton_ops` on CUDA. They replace the base's
results for tokens of adapters that have such a weight; other tokens stay unchanged.

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
    """Returns a norm's weight for each token: the adapter's own weight `index`, plus `offset`, or
    `weight`.

    Args:
        weight: [size] of the arena's dtype or float32, with the offset in it.
        table: The adapters' rows.
        plan: Tokens by slot.
        index: Index of the replaced weight.
        offset: Added to the adapter's values.

    Returns:
        [T, size] of weight's dtype.
    """
    if uses_triton(weight):
        from kernels.replaced import triton_ops  # Triton is an extra that the CPU does without

        return triton_ops.token_weights(weight, table, plan, index, offset)
    return reference.token_weights(weight, table, plan, index, offset)


def replace_embeddings(
    out: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, index: int
) -> None:
    """out[t] = row token_ids[t] of the weight that t's adapter has in place of embedding `index`,
    if it has the row. See `reference.replace_embeddings`.

    Args:
        out: [T, features] of the arena's dtype.
        token_ids: Integers [T]. An adapter's own tokens may lie beyond the base's.
        table: The adapters' rows.
        plan: Tokens by slot.
        index: Index of the replaced weight.
    """
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
    bias: torch.Tensor | None = None,
) -> None:
    """out[t, i] = x[t] . (row i of the weight that t's adapter has in place of head `index`), plus
    bias[i], if it has row i. See `reference.replace_logits`.

    Args:
        out: [T, >= vocab_size], as wide as the highest row; of the arena's dtype or float32.
        x: [T, features] of the arena's dtype.
        table: The adapters' rows.
        plan: Tokens by slot.
        index: Index of the replaced weight.
        vocab_size: Size of the base's vocabulary.
        bias: Of a whole weight, [vocab_size]. None: none.
    """
    if uses_triton(out):
        from kernels.replaced import triton_ops

        triton_ops.replace_logits(out, x, table, plan, index, vocab_size, bias)
    else:
        reference.replace_logits(out, x, table, plan, index, vocab_size, bias)
