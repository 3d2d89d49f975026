"""Norms over the heads of all ranks, in the walk."""

from __future__ import annotations

from dataclasses import replace

from inference_svc.model.description import Attention, Rank
from inference_svc.model.operations import (
    Listing,
    NormBySums,
    NormedColumns,
    SumRanks,
    SumSquares,
    Value,
)


def norm_all_heads(
    walk: Listing, rank: Rank | None, layer: int, attention: Attention, qkv: Value
) -> Attention:
    """Norms the queries and keys whose norms are over the heads of all ranks; returns the
    attention without these norms."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    normed: list[NormedColumns] = []
    if q_norm is not None and q_norm.cut is not None:
        normed.append(NormedColumns(q_norm, 0))
        q_norm = None
    if k_norm is not None and k_norm.cut is not None:
        normed.append(NormedColumns(k_norm, attention.q_size))
        k_norm = None
    if not normed:
        return attention
    assert rank is not None
    columns = tuple(normed)
    sums = walk.value("square_sums", len(columns), is_wide=True)
    walk.ops.append(SumSquares((qkv,), sums, layer, columns))
    walk.ops.append(SumRanks((sums,), sums, layer))
    walk.ops.append(NormBySums((qkv, sums), qkv, layer, columns, rank.count))
    return replace(attention, q_norm=q_norm, k_norm=k_norm)
