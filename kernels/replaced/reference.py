"""The definitions: plain torch, a loop over segments of tokens of one adapter.

They read `table.weight_rows` and the arena, as the kernels do; see `table.ReplacedWeight`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.lora import LoraPlan, LoraTable, ReplacedWeight
from kernels.lora.rows import ABSENT
from kernels.lora.views import vector_at


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
    found = weight.repeat(plan.num_tokens, 1)
    for start, end, own in _replaced(table, plan, index):
        values = vector_at(table.arena, own.full, len(weight))
        assert values is not None, "a norm's weight is replaced as a whole"
        found[start:end] = values.to(weight.dtype) + offset
    return found


def replace_embeddings(
    out: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, index: int
) -> None:
    """out[t] = row token_ids[t] of the weight that t's adapter has in place of embedding `index`,
    if it has the row.

    Args:
        out: [T, features] of the arena's dtype.
        token_ids: Integers [T]. An adapter's own tokens may lie beyond the base's.
        table: The adapters' rows.
        plan: Tokens by slot.
        index: Index of the replaced weight.
    """
    for start, end, own in _replaced(table, plan, index):
        ids, rows = token_ids[start:end], out[start:end]
        if own.full != ABSENT:
            matrix = vector_at(table.arena, own.full, (int(ids.max()) + 1) * out.shape[1])
            assert matrix is not None
            rows.copy_(matrix.view(-1, out.shape[1])[ids])
            continue
        row_ids, matrix = _rows(table, own, out.shape[1])
        places = torch.searchsorted(row_ids, ids.to(torch.int32)).clamp(max=len(row_ids) - 1)
        is_own = row_ids[places] == ids
        rows[is_own] = matrix[places[is_own]]


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
    bias[i], if it has row i.

    Args:
        out: [T, >= vocab_size], as wide as the highest row; of the arena's dtype or float32.
        x: [T, features] of the arena's dtype.
        table: The adapters' rows.
        plan: Tokens by slot.
        index: Index of the replaced weight.
        vocab_size: Size of the base's vocabulary.
        bias: Of a whole weight, [vocab_size]. None: none.
    """
    for start, end, own in _replaced(table, plan, index):
        rows, features = x[start:end], x.shape[1]
        if own.full != ABSENT:
            matrix = vector_at(table.arena, own.full, vocab_size * features)
            assert matrix is not None
            whole = matrix.view(-1, features)
            out[start:end, :vocab_size] = F.linear(rows, whole, bias)
            continue
        row_ids, matrix = _rows(table, own, features)
        out[start:end, row_ids.long()] = (rows @ matrix.t()).to(out.dtype)


def _replaced(
    table: LoraTable, plan: LoraPlan, index: int
) -> Iterator[tuple[int, int, ReplacedWeight]]:
    """Yields the segments whose adapters have weight `index`."""
    for start, end, slot, _ in plan.segments:
        full, row_ids, rows, num_rows = table.weight_rows[slot, :, index].tolist()
        if full or num_rows:
            yield start, end, ReplacedWeight(index, full - 1, row_ids - 1, rows - 1, num_rows)


def _rows(
    table: LoraTable, own: ReplacedWeight, features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids, int32 [num_rows], and [num_rows, features]."""
    row_ids = vector_at(table.arena, own.row_ids, own.num_rows, torch.int32)
    rows = vector_at(table.arena, own.rows, own.num_rows * features)
    assert row_ids is not None
    assert rows is not None
    return row_ids, rows.view(-1, features)
