"""When the values of a list of operations are needed, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from inference_svc.model.description import Decoder
from inference_svc.model.operations import Op, Rows, Value


class ValueSizes(NamedTuple):
    """The most rows of values, and the dtype of the model. A value without width has `pair_bytes`
    for each pair."""

    max_tokens: int
    max_logits: int
    max_pairs: int
    dtype: torch.dtype
    pair_bytes: int = 0

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        max_tokens: int,
        max_logits: int,
        dtype: torch.dtype,
        pair_bytes: int = 0,
    ) -> ValueSizes:
        chosen = max((each.num_chosen for each in decoder.mixtures), default=0)
        return cls(max_tokens, max_logits, max_tokens * chosen, dtype, pair_bytes)

    def rows(self, value: Value) -> int:
        of_rows = {
            Rows.TOKENS: self.max_tokens,
            Rows.LOGITS: self.max_logits,
            Rows.PAIRS: self.max_pairs,
        }
        return of_rows[value.rows]

    def dtype_of(self, value: Value) -> torch.dtype:
        return torch.float32 if value.is_wide else self.dtype

    def num_bytes(self, value: Value) -> int:
        if value.width == 0:
            return self.max_pairs * self.pair_bytes
        return self.rows(value) * value.width * self.dtype_of(value).itemsize


def last_uses(ops: Sequence[Op], kept: Collection[Value] = ()) -> list[tuple[Value, ...]]:
    """Returns for each operation the values that no later one reads before they are written anew,
    except the ones to be kept."""
    needed = set(kept)
    ends: list[tuple[Value, ...]] = []
    for op in reversed(ops):
        used = dict.fromkeys((*op.inputs, op.out))
        ends.append(tuple(value for value in used if value not in needed))
        needed.discard(op.out)
        needed.update(op.inputs)
    return ends[::-1]


def peak_bytes(
    ops: Sequence[Op],
    kept: Collection[Value],
    sizes: ValueSizes,
    own_bytes: Callable[[Op, Op | None], int],
) -> int:
    """Returns the most bytes at one time of operations that run one after the other. Values that
    are `kept` stay to the end. `own_bytes` are of an operation's memory beside its values, while it
    runs, by it and the one before."""
    live: dict[Value, int] = {}
    before: Op | None = None
    peak = 0
    for op, ended in zip(ops, last_uses(ops, kept), strict=True):
        live[op.out] = sizes.num_bytes(op.out)
        peak = max(peak, sum(live.values()) + own_bytes(op, before))
        for value in ended:
            live.pop(value, None)
        before = op
    return peak
