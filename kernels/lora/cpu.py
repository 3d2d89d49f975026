"""LoRA on the CPU: two products per segment and target, on views made at an adapter's first use.

A batch holds many small segments, so the cost is overhead. torch hands 16-bit products to oneDNN,
which spends some 15 us per call before it computes; torch's own matrix-vector product takes 3 us
for one row and sums in fp32. Short segments of 16-bit rows therefore go row by row through the
latter; fp32 products go to MKL, which has no such overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from .plan import LoraGroup, LoraPlan, LoraSegment
from .table import LoraTable
from .views import TargetWeights

MAX_SHORT_TOKENS = 5
"""16-bit segments up to here go row by row: the measured break-even against one oneDNN product."""


_Tokens = TypeVar("_Tokens", slice, int)
Product: TypeAlias = tuple[_Tokens, int, TargetWeights, torch.Tensor]
"""Tokens, which target of the group, its weights, and y, which A has made of their inputs."""


SumRanks: TypeAlias = Callable[[torch.Tensor], None]
"""Replaces a tensor, fp32 [N], by its sum over ranks. All call it in the same order."""


class Shrunk(NamedTuple):
    """The results of the products with A."""

    segments: list[Product[slice]]
    """y is `[tokens, a_rank]`."""
    rows: list[Product[int]]
    """Short segments row by row: y is `[a_rank]`."""


class _Columns(NamedTuple):
    """One target's columns, `[T, out]`, and the base's bias in them."""

    out: torch.Tensor
    base_bias: torch.Tensor | None

    def add(self, tokens: slice | int, weights: TargetWeights, y: torch.Tensor) -> None:
        """Adds the change of an adapter with vectors, from y with a row for each token."""
        rows, vectors = self.out[tokens], weights.vectors
        assert vectors is not None
        products = y.float() @ weights.b.float()
        total = vectors.of_base(rows.float(), self.base_bias)
        rows.copy_(total + vectors.of_added(products, weights.scale))


_Segment: TypeAlias = tuple[int, int, list[tuple[int, TargetWeights]]]
"""First token, end, and its adapter's weights of a group, by place in the group."""


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None = None,
    sum_ranks: SumRanks | None = None,
) -> None:
    """Computes `reference.add_lora` and `reference.add_lora_experts`: out [T, >= group.out_end], x
    [T, in_features], base_bias [>= group.out_end].

    The shrunk rows are rounded to the model's dtype. Each is expanded as soon as it is there:
    `expand` of the result of `shrink`. With `sum_ranks`, once the sums of all are there.
    """
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    if sum_ranks is not None:
        _add_summed(out, x, table, plan, group, base_bias, sum_ranks)
        return
    segments, short = _segments(x.dtype, table, plan, group)
    parts = _parts(out, plan, group, base_bias)
    for segment in plan.segments:
        if table.is_mix(segment.slot):
            rows = x[segment.start : segment.end]
            _add_mix(parts, segment, _mixed(table, segment, group, rows))
    if segments:
        _expand_segments(parts, _shrink_segments(x, segments))
    if short:
        with _own_products():
            _expand_rows(parts, _shrink_rows(x, short))


def _add_summed(
    out: torch.Tensor,
    x: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None,
    sum_ranks: SumRanks,
) -> None:
    """Expands sums over ranks of the shrunk rows. All ranks have rows of equal sizes, because their
    plans and the ranks of their adapters are equal; what is missing on some has rank 0."""
    of_mixes = [
        (segment, list(_mixed(table, segment, group, x[segment.start : segment.end])))
        for segment in plan.segments
        if table.is_mix(segment.slot)
    ]
    shrunk = shrink(x, table, plan, group)
    mixed = [product[-1] for _, products in of_mixes for product in products]
    ys = [*mixed, *(product[-1] for product in chain(shrunk.segments, shrunk.rows))]
    summed = iter(_summed(ys, sum_ranks))
    parts = _parts(out, plan, group, base_bias)
    for segment, products in of_mixes:
        _add_mix(parts, segment, [(k, w, next(summed)) for k, w, _ in products])
    segments = [(tokens, k, w, next(summed)) for tokens, k, w, _ in shrunk.segments]
    rows = [(token, k, w, next(summed)) for token, k, w, _ in shrunk.rows]
    expand(out, Shrunk(segments, rows), plan, group, base_bias)


def _summed(ys: Sequence[torch.Tensor], sum_ranks: SumRanks) -> list[torch.Tensor]:
    """Returns the sums over ranks of tensors, which are exchanged as one."""
    flat = torch.cat([y.reshape(-1).float() for y in ys]) if ys else torch.empty(0)
    if len(flat):
        sum_ranks(flat)
    pieces = flat.split([y.numel() for y in ys])
    return [piece.view(y.shape).to(y.dtype) for piece, y in zip(pieces, ys, strict=True)]


def add_lora_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, target: int
) -> None:
    """Computes `reference.add_lora_embedding`: out [T, out_features] of a float dtype, token_ids
    integers [T]."""
    assert table.rank_parts == 1, "others have parts of the shrunk rows"
    group = LoraGroup((target,), 0, (0,), (out.shape[1],))
    parts = _parts(out, plan, group, None)
    for segment in plan.segments:
        if table.is_mix(segment.slot):
            ids = token_ids[segment.start : segment.end]
            _add_mix(parts, segment, _mixed(table, segment, group, ids))
    expand(out, gather(token_ids, table, plan, target), plan, group)


def shrink(x: torch.Tensor, table: LoraTable, plan: LoraPlan, group: LoraGroup) -> Shrunk:
    """Computes `reference.shrink` of x [T, in_features], of the arena's dtype."""
    segments, short = _segments(x.dtype, table, plan, group)
    shrunk = Shrunk(list(_shrink_segments(x, segments)), [])
    if short:
        with _own_products():
            shrunk.rows.extend(_shrink_rows(x, short))
    return shrunk


def gather(token_ids: torch.Tensor, table: LoraTable, plan: LoraPlan, target: int) -> Shrunk:
    """Computes `reference.gather` of token_ids, integers [T]."""
    group = LoraGroup((target,), 0, (0,), (0,))
    shrunk = Shrunk([], [])
    segments, short = _segments(table.arena.dtype, table, plan, group)
    for start, end, present in segments:
        ids = token_ids[start:end]
        shrunk.segments.extend((slice(start, end), k, w, w.rows_of_a(ids)) for k, w in present)
    for start, end, present in short:
        ids = token_ids[start:end]
        for k, w in present:
            y = w.rows_of_a(ids)
            shrunk.rows.extend((start + i, k, w, y[i]) for i in range(end - start))
    return shrunk


def expand(
    out: torch.Tensor,
    shrunk: Shrunk,
    plan: LoraPlan,
    group: LoraGroup,
    base_bias: torch.Tensor | None = None,
) -> None:
    """See `reference.expand`: out [T, sum of the group's outs] of a float dtype, base_bias of its
    width and dtype. y is `[tokens, b_rank]`, or `[b_rank]`."""
    parts = _parts(out, plan, group, base_bias)
    _expand_segments(parts, shrunk.segments)
    if shrunk.rows:
        with _own_products():
            _expand_rows(parts, shrunk.rows)


def _segments(
    dtype: torch.dtype, table: LoraTable, plan: LoraPlan, group: LoraGroup
) -> tuple[list[_Segment], list[_Segment]]:
    """Returns the segments of single adapters with any of the group's targets: long ones, and short
    ones that go row by row."""
    max_short = 0 if dtype == torch.float32 else MAX_SHORT_TOKENS
    segments: list[_Segment] = []
    short: list[_Segment] = []
    for start, end, slot, expert in plan.segments:
        if table.is_mix(slot):
            continue
        weights = table.weights(slot, expert)
        present = [(k, weights[t]) for k, t in enumerate(group.targets) if t in weights]
        if present:
            (short if end - start <= max_short else segments).append((start, end, present))
    return segments, short


def _parts(
    out: torch.Tensor, plan: LoraPlan, group: LoraGroup, base_bias: torch.Tensor | None
) -> dict[int, _Columns]:
    """Returns the columns of each target that any adapter of the batch has."""
    columns = zip(group.targets, group.out_offsets, group.out_features, strict=True)
    return {
        k: _Columns(
            out.narrow(1, offset, width),
            None if base_bias is None else base_bias.narrow(0, offset, width),
        )
        for k, (target, offset, width) in enumerate(columns)
        if target in plan.targets
    }


def _mixed(
    table: LoraTable,
    segment: LoraSegment,
    group: LoraGroup,
    rows: torch.Tensor,
) -> Iterator[tuple[int, TargetWeights, torch.Tensor]]:
    """Yields the products of a mix's parts with A, or the rows of A with these ids. For one target
    they come in the order of the parts."""
    for k, target in enumerate(group.targets):
        for slot in table.part_slots(segment.slot):
            w = table.weights(slot, segment.expert).get(target)
            if w is not None:
                yield k, w, rows.mm(w.a_t) if rows.dim() == 2 else w.rows_of_a(rows)


def _add_mix(
    parts: Mapping[int, _Columns],
    segment: LoraSegment,
    products: Iterable[tuple[int, TargetWeights, torch.Tensor]],
) -> None:
    for k, of_target in groupby(products, key=lambda product: product[0]):
        rows, found = parts[k].out[segment.start : segment.end], list(of_target)
        total = rows.float()
        for _, w, _ in found:
            if w.vectors is not None:
                total = w.vectors.of_base(total, parts[k].base_bias)
        for _, w, y in found:
            if w.vectors is None:
                total.addmm_(y.float(), w.b.float(), alpha=w.scale)
            else:
                total += w.vectors.of_added(y.float().mm(w.b.float()), w.scale)
        rows.copy_(total)


def _shrink_segments(x: torch.Tensor, segments: Iterable[_Segment]) -> Iterator[Product[slice]]:
    for start, end, present in segments:
        tokens = slice(start, end)
        rows = x[tokens]
        for k, w in present:
            yield tokens, k, w, rows.mm(w.a_t)


def _shrink_rows(x: torch.Tensor, segments: Iterable[_Segment]) -> Iterator[Product[int]]:
    for start, end, present in segments:
        for t in range(start, end):
            row = x[t]
            for k, w in present:
                yield t, k, w, w.a.mv(row)


def _expand_segments(parts: Mapping[int, _Columns], products: Iterable[Product[slice]]) -> None:
    for tokens, k, w, y in products:
        rows = parts[k].out[tokens]
        if w.vectors is None and rows.dtype == y.dtype:
            rows.addmm_(y, w.b, alpha=w.scale)
        elif w.vectors is None:
            rows.addmm_(y.float(), w.b.float(), alpha=w.scale)
        else:
            parts[k].add(tokens, w, y)


def _expand_rows(parts: Mapping[int, _Columns], products: Iterable[Product[int]]) -> None:
    for t, k, w, y in products:
        row = parts[k].out[t]
        if w.vectors is None and row.dtype == y.dtype:
            row.addmv_(w.b_t, y, alpha=w.scale)
        elif w.vectors is None:
            row.addmv_(w.b_t.float(), y.float(), alpha=w.scale)
        else:
            parts[k].add(t, w, y)


@contextmanager
def _own_products() -> Iterator[None]:
    """Keeps torch from handing products to oneDNN. The switch is the process's: other threads that
    multiply meanwhile are right, only slower."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
