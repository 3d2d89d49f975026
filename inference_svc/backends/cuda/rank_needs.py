"""The device memory and the kernels that steps of ranks take in addition to those of one device."""

from __future__ import annotations

from inference_svc.model.description import Decoder
from inference_svc.model.lifetimes import ValueSizes
from inference_svc.model.operations import (
    Combine,
    Embed,
    Logits,
    NormBySums,
    NormedColumns,
    Op,
    SumSquares,
)

NCCL_BYTES = 640 << 20
"""The buffers of a group, for all channels and protocols, its kernels, and the plans of recorded
exchanges. An estimate: none was measured."""
LOOKUP_BYTES, LOOKUP_NODES = 32, 7
"""A lookup finds a token's number among the rank's rows, twice, and whether it has one; then it
clears the rows of others."""
SUM_NODES, NORM_NODES = 3, 9
"""The squares of columns whose norm is over all ranks are made and summed; then comes the norm."""


def exchange_bytes(op: Op, sizes: ValueSizes) -> int:
    """Returns the memory of an operation for other ranks, beside its inputs and outputs."""
    num_rows, item_bytes = sizes.rows(op.out), sizes.dtype.itemsize
    if isinstance(op, Embed) and op.table.cut is not None:
        return LOOKUP_BYTES * num_rows
    if isinstance(op, Combine) and op.lacks_pairs:
        return item_bytes * (sizes.max_pairs + 1) * op.inputs[0].width
    if isinstance(op, Logits) and op.cut is not None:
        # This rank's, padded to the largest part, and all ranks' as they come.
        num_ranks = -(-op.out.width // op.part_size)
        return item_bytes * num_rows * op.part_size * (2 + num_ranks)
    if isinstance(op, SumSquares | NormBySums):
        return 3 * 4 * num_rows * _widest(op.normed)
    return 0


def _widest(normed: tuple[NormedColumns, ...]) -> int:
    return max(each.norm.size for each in normed)


def exchange_nodes(op: Op) -> int:
    """Returns how many kernels an operation has for other ranks in addition to its own."""
    if isinstance(op, Embed) and op.table.cut is not None:
        return LOOKUP_NODES  # the sum is one of these
    if isinstance(op, Combine) and op.lacks_pairs:
        return 2
    if isinstance(op, Logits) and op.cut is not None:
        return 5  # padding fills and copies; rows come, and are laid side by side, without padding
    if isinstance(op, SumSquares):
        return SUM_NODES * len(op.normed)
    if isinstance(op, NormBySums):
        return NORM_NODES * len(op.normed) - 1
    return 0


def library_bytes(decoder: Decoder) -> int:
    """Returns the memory of libraries by which ranks exchange."""
    return 0 if decoder.rank is None else NCCL_BYTES
