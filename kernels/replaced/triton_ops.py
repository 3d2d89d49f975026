"""Launches of the Triton kernels: one each. Grids follow from sizes alone."""

from __future__ import annotations

import torch

from kernels import tuning
from kernels.elementwise.triton_ops import power_of_2
from kernels.lora import GRANULE_BYTES, LoraPlan, LoraTable
from kernels.replaced import triton_kernels as kernels


def token_weights(
    weight: torch.Tensor, table: LoraTable, plan: LoraPlan, index: int, offset: float = 0.0
) -> torch.Tensor:
    """Launches `reference.token_weights`: weight [size] of a float dtype -> [T, size]."""
    assert weight.is_contiguous()
    size = len(weight)
    out = weight.new_empty(plan.num_tokens, size)
    block = min(power_of_2(size), tuning.constants("replaced")["block"])
    kernels.token_weights_kernel[(plan.num_tokens, -(-size // block))](
        out,
        weight,
        table.arena,
        table.weight_rows,
        plan.token_slots,
        index,
        offset,
        SIZE=size,
        WEIGHTS=table.num_weights,
        GRANULE=GRANULE_BYTES // table.arena.itemsize,
        BLOCK=block,
    )
    return out


def replace_embeddings(
    out: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, index: int
) -> None:
    """Launches `reference.replace_embeddings`: out [T, features] of the arena's dtype, token_ids
    integers [T]."""
    assert out.is_contiguous()
    assert token_ids.is_contiguous()
    size = out.shape[1]
    block = min(power_of_2(size), tuning.constants("replaced")["block"])
    kernels.replace_embeddings_kernel[(plan.num_tokens, -(-size // block))](
        out,
        token_ids,
        table.arena,
        table.weight_rows,
        plan.token_slots,
        index,
        SIZE=size,
        WEIGHTS=table.num_weights,
        GRANULE=GRANULE_BYTES // table.arena.itemsize,
        BLOCK=block,
    )


def replace_logits(
    out: torch.Tensor,
    x: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    index: int,
    vocab_size: int,
    bias: torch.Tensor | None = None,
) -> None:
    """Launches `reference.replace_logits`: out, float [T, >= vocab_size], x [T, features] of the
    arena's dtype, bias [vocab_size]. Rows of `out` have unit stride."""
    assert out.stride(1) == 1
    assert x.is_contiguous()
    tuned = tuning.constants("replaced")
    # An adapter may have every row of the base, and rows of tokens that it adds.
    num_blocks = -(-out.shape[1] // tuned["block_n"])
    kernels.replace_logits_kernel[(-(-plan.num_tokens // tuned["block_m"]), num_blocks)](
        out,
        x,
        bias,
        table.arena,
        table.weight_rows,
        plan.token_slots,
        index,
        vocab_size,
        plan.num_tokens,
        out.stride(0),
        SIZE=x.shape[1],
        WEIGHTS=table.num_weights,
        GRANULE=GRANULE_BYTES // table.arena.itemsize,
        BLOCK_M=tuned["block_m"],
        BLOCK_N=tuned["block_n"],
        BLOCK_K=tuned["block_k"],
        PRECISION="ieee",
        num_warps=tuned["num_warps"],
    )
