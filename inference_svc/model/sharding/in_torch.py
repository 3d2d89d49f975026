"""The operations that ranks compute together, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.model.description import Cut
from inference_svc.model.operations import (
    HandOn,
    Logits,
    NormBySums,
    Op,
    Receive,
    Rows,
    SumRanks,
    SumSquares,
)
from inference_svc.model.sharding.exchange import Exchange
from inference_svc.model.step import Step
from kernels.elementwise import norm_by_sum


def embed(token_ids: Tensor, table: Tensor, cut: Cut, ranks: Exchange) -> Tensor:
    """Looks up tokens in a table of which each rank has some rows: each gives its rows, and zeros
    for others.

    Args:
        token_ids: int64 [T].
        table: This rank's rows, [cut.size, size].
        cut: The tokens of these.
        ranks: All ranks.

    Returns:
        [T, size]
    """
    own = token_ids - cut.start
    is_absent = (own < 0) | (own >= len(table))
    out = F.embedding(own.clamp(0, len(table) - 1), table).masked_fill_(is_absent[:, None], 0)
    ranks.sum(out)
    return out


def gather_logits(own: Tensor, op: Logits, ranks: Exchange) -> Tensor:
    """Returns the logits of all ranks side by side, [rows, vocabulary], of which this rank has
    `own`, [rows, op.cut.size]."""
    assert op.cut is not None
    padded = F.pad(own, (0, op.part_size - op.cut.size))
    return ranks.side_by_side(padded)[:, : op.out.width].contiguous()


def _sum_ranks(op: SumRanks, step: Step) -> Tensor:
    x: Tensor = step.values[op.out]
    step.ranks.sum(x)
    return x


def _receive(op: Receive, step: Step) -> Tensor:
    if op.out.rows is Rows.LOGITS:
        width = op.out.width + step.num_added_tokens
        x = step.weights.embedding.new_empty(len(step.rows), width)
    else:
        x = step.weights.embedding.new_empty(len(step.inputs.token_ids), op.out.width)
    step.stages.receive(x, op.stage)
    return x


def _hand_on(op: HandOn, step: Step) -> Tensor:
    """Hands logits on with the columns of tokens that adapters may add, whether any has: the other
    stage does not know."""
    x: Tensor = step.values[op.out]
    handed = x
    missing = op.out.width + step.num_added_tokens - x.shape[1]
    if op.out.rows is Rows.LOGITS and missing:
        handed = F.pad(x, (0, missing), value=float("-inf"))
    step.stages.send(handed.contiguous(), op.stage)
    return x


def _sum_squares(op: SumSquares, step: Step) -> Tensor:
    x: Tensor = step.values[op.inputs[0]]
    parts = (x[:, each.range].float() for each in op.normed)
    return torch.stack([part.square().sum(dim=1) for part in parts], dim=1)


def _norm_by_sums(op: NormBySums, step: Step) -> Tensor:
    x, sums = (step.values[each] for each in op.inputs)
    for each, sum_of_part in zip(op.normed, sums.unbind(1), strict=True):
        norm = step.norm(each.norm, op.layer, Rows.TOKENS)
        assert norm is not None
        part, count = x[:, each.range], each.norm.size * op.num_ranks
        part.copy_(norm_by_sum(part, norm.weight, norm.eps, sum_of_part, count))
    assert isinstance(x, Tensor)
    return x


COMPUTE: Mapping[type[Op], Callable[[Any, Step], object]] = {
    HandOn: _hand_on,
    NormBySums: _norm_by_sums,
    Receive: _receive,
    SumRanks: _sum_ranks,
    SumSquares: _sum_squares,
}
"""Their part of `transformer.COMPUTE`."""
