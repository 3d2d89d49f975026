"""The parts of a target's segments: saved matrices, cut, turned and scaled.

The order of a target's segments, and their forms:

    A          [rank, in]; of an embedding [vocabulary, rank]; of experts see below
    B          [rank, out], transposed, the scale folded in
    BIAS       float32 [out], the scale folded in
    MAGNITUDE  float32 [out]
    ROW_IDS    int32 [rows], ascending
    ROWS       [rows, features]
    FULL       as the base's weight: [out, in], of an embedding [vocabulary, features], [out]

All are row-major in the layout's dtype where none is given, A and B in its adapter_dtype, and cut
to the layout's slices; A to its part of the rank. A and B of experts begin with an index, int32
[experts held, 4]: granule of the expert's matrix within the segment, rank, bits of the scale
(float32 1), 0. Each matrix begins on 256 bytes; those with the same bytes lie there once. An expert
that the adapter lacks has rank 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.checkpoint.weights import ExpertWeights, Matrix, Replacement
from adapter_store.images.plan.base_rows import Kept
from adapter_store.images.plan.fit import pairs_of
from adapter_store.images.plan.uses import Use
from contract.images.dtypes import DataType
from contract.images.expert_index import ExpertIndex
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind

Selection: TypeAlias = range | NDArray[np.int64]
"""Indices, ascending."""


class Piece(NamedTuple):
    """Values of a saved matrix and where they go: to `offset` of the segment, row-major, these rows
    and columns of it, or their transpose. `places`: to which row there each goes, if not in order.
    """

    matrix: Matrix
    rows: Selection
    columns: range
    is_transposed: bool = False
    scale: float = 1.0
    offset: int = 0
    places: NDArray[np.int64] | None = None

    @property
    def identity(self) -> Hashable:
        """Is equal for pieces of equal values."""
        rows = self.rows if isinstance(self.rows, range) else self.rows.tobytes()
        return self.matrix, rows, self.columns, self.is_transposed, self.scale

    @property
    def shape(self) -> tuple[int, int]:
        """Returns its shape in the segment."""
        shape = len(self.rows), len(self.columns)
        return shape[::-1] if self.is_transposed else shape


class SegmentSource(NamedTuple):
    """A segment, and its parts: `prefix`, which is its first bytes, and pieces."""

    kind: SegmentKind
    rank: int
    dtype: DataType
    shape: tuple[int, ...]
    length_bytes: int
    pieces: tuple[Piece, ...]
    prefix: bytes = b""

    @property
    def identity(self) -> Hashable:
        """Is equal for segments of equal bytes."""
        return self.dtype, self.prefix, *(piece.identity for piece in self.pieces)


def segment_sources(use: Use, layout: Layout, kept: Kept) -> Iterator[SegmentSource]:
    """Returns the segments of a target that this server holds. `kept` says which rows of the base's
    own weights the adapter changes."""
    changes = use.changes
    if isinstance(changes, TargetWeights):
        return _lora(use, changes, layout.lora_dtype)
    if isinstance(changes, ExpertWeights):
        return _experts(use, changes, layout.lora_dtype)
    assert isinstance(changes, Replacement)
    return _replacement(use.target, changes, layout.dtype, kept)


def has_even_experts(use: Use, layout: Layout) -> bool:
    """Returns whether a target's segments have the same sizes in each part of the experts, where
    the layout holds one of several."""
    target, changes = use.target, use.changes
    if target.expert_slice is None or not isinstance(changes, ExpertWeights):
        return True
    size = target.num_experts
    parts = [(start, start + size) for start in range(0, target.experts - size + 1, size)]
    others = (use._replace(target=replace(target, expert_slice=part)) for part in parts)
    segments = (_experts(each, changes, layout.lora_dtype) for each in others)
    return len({tuple((each.rank, each.length_bytes) for each in found) for found in segments}) < 2


def outputs_of(use: Use, num_outputs: int) -> Selection:
    """Returns the rows of a saved B that are the outputs which this server holds."""
    target, other = use.target, use.other
    held = range(*target.outputs) if target.out_features else range(num_outputs)
    if other is None:
        return held
    if other.outputs is not None:
        start = other.outputs[0]
        return range(start + held.start, start + held.stop)
    if other.block_sizes:
        size, sizes = other.block_sizes[other.block_part], other.block_sizes
        blocks, within = np.divmod(np.arange(held.start, held.stop), size)
        return np.asarray(blocks * sum(sizes) + sum(sizes[: other.block_part]) + within)
    return held


def _lora(use: Use, weights: TargetWeights, dtype: DataType) -> Iterator[SegmentSource]:
    target = use.target
    ranks = range(*target.ranks(weights.rank))
    is_embedding = target.kind is TargetKind.EMBEDDING
    if ranks:
        matrix = Matrix.of(weights.a, is_transposed=weights.is_transposed)
        a = Piece(matrix, ranks, range(*target.inputs), is_embedding)
        yield _of_piece(SegmentKind.A, len(ranks), dtype, a)
    outputs = outputs_of(use, weights.out_features)
    matrix = Matrix.of(weights.b, is_transposed=weights.is_transposed)
    b = Piece(matrix, outputs, range(weights.rank), True, weights.scale)
    yield _of_piece(SegmentKind.B, weights.rank, dtype, b)
    if weights.bias is not None:  # with sliced inputs one rank adds it
        yield _of_vector(SegmentKind.BIAS, Matrix.of(weights.bias), outputs, weights.scale)
    if weights.magnitude is not None:
        yield _of_vector(SegmentKind.MAGNITUDE, Matrix.of(weights.magnitude), outputs)


def _of_piece(kind: SegmentKind, rank: int, dtype: DataType, piece: Piece) -> SegmentSource:
    shape = piece.shape
    length = shape[0] * shape[1] * dtype.itemsize
    return SegmentSource(kind, rank, dtype, shape, length, (piece,))


def _of_vector(
    kind: SegmentKind, vector: Matrix, outputs: Selection, scale: float = 1.0
) -> SegmentSource:
    piece = Piece(vector.transposed, outputs, range(1), True, scale)
    length = len(outputs) * DataType.FLOAT32.itemsize
    return SegmentSource(kind, 0, DataType.FLOAT32, (len(outputs),), length, (piece,))


def _experts(use: Use, experts: ExpertWeights, dtype: DataType) -> Iterator[SegmentSource]:
    target = use.target
    pairs = pairs_of(use, experts)
    held = [pairs.get(index) for index in range(*target.held_experts)]
    a_pieces: list[Piece | None] = []
    b_pieces: list[Piece | None] = []
    for index, pair in zip(range(*target.held_experts), held, strict=True):
        if pair is None:
            a_pieces.append(None)
            b_pieces.append(None)
            continue
        a, b = pair
        rank = a.shape[0]
        ranks = range(*target.ranks(rank))
        a_pieces.append(Piece(a, ranks, range(*target.inputs)) if ranks else None)
        outputs = outputs_of(use, b.shape[0])
        scale = experts.scales.get(index, experts.scale)
        b_pieces.append(Piece(b, outputs, range(rank), True, scale))
    yield _with_index(SegmentKind.A, dtype, target.num_in, a_pieces)
    yield _with_index(SegmentKind.B, dtype, target.num_out, b_pieces)


def _with_index(
    kind: SegmentKind, dtype: DataType, num_features: int, pieces: Sequence[Piece | None]
) -> SegmentSource:
    """Returns a segment of one matrix for each expert, [rank, features] in the image."""
    index = ExpertIndex(len(pieces), num_features * dtype.itemsize)
    places: dict[Matrix, int] = {}
    placed: list[Piece] = []
    for expert, piece in enumerate(pieces):
        if piece is None:
            continue
        at = places.get(piece.matrix)
        if at is None:
            at = places[piece.matrix] = index.end
            placed.append(
                Piece(piece.matrix, piece.rows, piece.columns, piece.is_transposed, piece.scale, at)
            )
        index.add(expert, at, piece.shape[0])
    shape = (len(pieces), num_features)
    return SegmentSource(kind, index.rank, dtype, shape, index.end, tuple(placed), index.to_bytes())


def _replacement(
    target: Target, replacement: Replacement, dtype: DataType, kept: Kept
) -> Iterator[SegmentSource]:
    matrix = Matrix.of(replacement.record)
    if target.kind is TargetKind.VECTOR:
        if kept.is_whole:
            size = replacement.record.shape[-1]  # its own, of any size, if the base has none
            outputs = range(*target.outputs) if target.out_features else range(size)
            piece = Piece(matrix.transposed, outputs, range(1), True)
            length = len(outputs) * dtype.itemsize
            yield SegmentSource(SegmentKind.FULL, 0, dtype, (len(outputs),), length, (piece,))
        return
    is_embedding = target.kind is TargetKind.EMBEDDING
    held = range(*(target.inputs if is_embedding else target.outputs))
    if not target.num_rows:
        held = range(matrix.shape[0])
    columns = range(*(target.outputs if is_embedding else target.inputs))
    if kept.is_whole:
        yield _of_piece(SegmentKind.FULL, 0, dtype, Piece(matrix, held, columns))
        return
    # Rows behind the base's are the last part's.
    is_last = held.stop == target.num_rows
    rows = [
        (row, row_id)
        for row, row_id in kept.rows
        if row_id in held or (is_last and row_id >= target.num_rows)
    ]
    if not rows:
        return
    chosen = np.array([row for row, _ in rows], np.int64)
    order = np.argsort(chosen)
    ids = np.array([row_id for _, row_id in rows], "<i4").tobytes()
    int32 = DataType.INT32
    yield SegmentSource(SegmentKind.ROW_IDS, 0, int32, (len(rows),), len(ids), (), ids)
    piece = Piece(matrix, chosen[order], columns, places=order)
    yield _of_piece(SegmentKind.ROWS, 0, dtype, piece)
