"""The device memory and the kernels that steps of ranks take in addition to those of one device."""

from __future__ import annotations

from inference_svc.backends.exchange import stage_pairs
from inference_svc.model.description import Decoder
from inference_svc.model.lifetimes import ValueSizes
from inference_svc.model.operations import (
    Embed,
    HandOn,
    Logits,
    NormBySums,
    NormedColumns,
    Op,
    Receive,
    Route,
    Rows,
    SumSquares,
)

NCCL_BYTES = 640 << 20
"""The buffers of a group, for all channels and protocols, its kernels, and the plans of recorded
exchanges. An estimate: none was measured."""
STAGE_PAIR_BYTES = 96 << 20
"""The same of two ranks, of which one hands values on to another stage: an estimate."""
OWN_PAIR_BYTES = 12
"""A pair's token and place among the pairs of this rank's experts."""
LOOKUP_BYTES, LOOKUP_NODES = 32, 7
"""A lookup finds a token's number among the rank's rows, twice, and whether it has one; then it
clears the rows of others."""
SUM_NODES, NORM_NODES = 3, 9
"""The squares of columns whose norm is over all ranks are made and summed; then comes the norm."""


def exchange_bytes(op: Op, sizes: ValueSizes, max_added_tokens: int) -> int:
    """Returns the memory of an operation for other ranks, beside its inputs and outputs. Stages
    hand on logits of all tokens that adapters may add."""
    num_rows, item_bytes = sizes.rows(op.out), sizes.dtype.itemsize
    if isinstance(op, Embed) and op.table.cut is not None:
        return LOOKUP_BYTES * num_rows
    if isinstance(op, Route) and op.experts.cut is not None:
        return OWN_PAIR_BYTES * sizes.max_pairs + 4 * (op.experts.num_experts + 1)
    if isinstance(op, HandOn | Receive) and op.out.rows is Rows.LOGITS and max_added_tokens:
        return item_bytes * num_rows * (op.out.width + max_added_tokens)
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
    if isinstance(op, Route) and op.experts.cut is not None:
        return 1
    if isinstance(op, Logits) and op.cut is not None:
        return 5  # padding fills and copies; rows come, and are laid side by side, without padding
    if isinstance(op, SumSquares):
        return SUM_NODES * len(op.normed)
    if isinstance(op, NormBySums):
        return NORM_NODES * len(op.normed) - 1
    return 0


def library_bytes(decoder: Decoder) -> int:
    """Returns the memory of libraries by which ranks exchange."""
    of_stage = 0 if decoder.rank is None else NCCL_BYTES
    stage = decoder.stage
    if stage is None:
        return of_stage
    num_ranks = 1 if decoder.rank is None else decoder.rank.count
    index = 0 if decoder.rank is None else decoder.rank.index
    ends = [
        {(source, index_of_pair), (target, index_of_pair)}
        for source, target, index_of_pair in stage_pairs(num_ranks, stage.count)
    ]
    num_pairs = sum((stage.index, index) in each for each in ends)
    # All ranks have a group, too, whose buffers are as large, although it sums few numbers.
    return of_stage + NCCL_BYTES + STAGE_PAIR_BYTES * num_pairs
