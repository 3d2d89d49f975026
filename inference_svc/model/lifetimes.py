"""When the values of a list of operations are needed, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

import torch

from inference_svc.model.description import Decoder, Norm
from inference_svc.model.operations import Op, Rows, Value
from inference_svc.model.walk import operations


class ValueSizes(NamedTuple):
    """The most rows of values, and the dtype of the model. A value without width has `pair_bytes`
    for each pair; a cell has `merge` patches each side."""

    max_tokens: int
    max_logits: int
    max_pairs: int
    dtype: torch.dtype
    pair_bytes: int = 0
    merge: int = 1

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
        merge = 1 if decoder.patches is None else decoder.patches.form.merge
        return cls(max_tokens, max_logits, max_tokens * chosen, dtype, pair_bytes, merge)

    def rows(self, value: Value) -> int:
        of_rows = {
            Rows.TOKENS: self.max_tokens,
            Rows.LOGITS: self.max_logits,
            Rows.PAIRS: self.max_pairs,
            Rows.CELLS: self.max_logits // self.merge**2,
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
    moments = _moments(tuple(ops), tuple(kept))
    return max(
        sum(map(sizes.num_bytes, live)) + own_bytes(op, before) for live, op, before in moments
    )


def transformer_bytes(
    decoder: Decoder, sizes: ValueSizes, own_bytes: Callable[[Op, Op | None], int]
) -> int:
    """Returns the most bytes that a step of these sizes allocates at one time, the logits of scored
    tokens included. `own_bytes`: see `peak_bytes`."""
    found = operations(decoder)
    # Its angles have cos and sin of the whole width, and stay to the end of the layers.
    angles = sum(rope.rotary_size(head_dim) for rope, head_dim in decoder.ropes)
    angles_bytes = sizes.max_tokens * angles * sizes.dtype.itemsize
    ops = (*found.layers, *found.head)
    return angles_bytes + peak_bytes(ops, found.kept, sizes, own_bytes)


@lru_cache(maxsize=8)
def _moments(
    ops: tuple[Op, ...], kept: tuple[Value, ...]
) -> tuple[tuple[tuple[Value, ...], Op, Op | None], ...]:
    """Returns each operation with the values that exist while it runs, and the one before it; of
    layers that are alike, the first one's."""
    found: dict[object, tuple[tuple[Value, ...], Op, Op | None]] = {}
    live: dict[Value, None] = {}
    before: Op | None = None
    for op, ended in zip(ops, last_uses(ops, kept), strict=True):
        live[op.out] = None
        form = frozenset(live), _form(op), None if before is None else _form(before)
        found.setdefault(form, (tuple(live), op, before))
        for value in ended:
            live.pop(value, None)
        before = op
    return tuple(found.values())


def _form(op: Op) -> tuple[object, ...]:
    """Returns everything about an operation but its layer."""
    names = (each.name for each in fields(op))
    parts = (getattr(op, name) for name in names if name not in ("layer", "group", "sum_scale"))
    return type(op), *parts


def token_weights_bytes(op: Op, sizes: ValueSizes, replaced: Collection[str]) -> int:
    """Returns the bytes of the weights and biases of an operation's norms, with one for each row,
    if adapters may replace them: `replaced` has the names of weights."""
    size = sum(
        spec.size * (4 if spec.is_wide else sizes.dtype.itemsize)
        for spec, layer in op.weights
        if isinstance(spec, Norm)
        for name in (spec.path(layer), f"{spec.path(layer)}.bias")
        if name in replaced
    )
    return sizes.rows(op.out) * size
