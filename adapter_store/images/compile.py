"""Compiles a checkpoint into an image, part by part, and hashes the parts.

Of each segment, saved matrices are cut, scaled in fp32, cast and transposed. Source rows pass
through in runs of about a megabyte: data in flight stays in the processor's cache, small tensors
that lie side by side are read, cast and checked together, and memory stays near the image's own
size.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint
from adapter_store.checkpoint.reading.files import OpenFile, Scratch
from adapter_store.checkpoint.reading.safetensors import group_adjacent
from adapter_store.checkpoint.weights import Matrix
from adapter_store.core import ImagePart
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.plan.plan import ImagePlan, plan_image
from adapter_store.images.plan.scales import measured
from adapter_store.images.plan.sources import Piece, SegmentSource, Selection
from adapter_store.images.tiers.buffers import allocate_buffer
from contract.images.dtypes import DataType
from contract.images.header import Segment, trailer_sha256
from contract.images.layouts import Layout

CHUNK_BYTES = 1 << 20
TRANSPOSE_BYTES = 32 << 10
"""A transposed copy in blocks of this size stays in the first-level cache."""
PARTS_AT_ONCE = min(4, os.cpu_count() or 1)
"""Parts of one image that are begun, besides the awaited one."""

# bf16 has no numpy type, and a copy needs none.
_INTEGERS: dict[int, type[np.signedinteger]] = {1: np.int8, 2: np.int16, 4: np.int32}

_Sourced: TypeAlias = tuple[Segment, SegmentSource]

_read_bytes, _cast_bytes = Scratch(CHUNK_BYTES), Scratch(CHUNK_BYTES)


def use_one_thread_per_image() -> None:
    """Images compile side by side: each with all processors would only slow the others down."""
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An adapter's bytes for one layout. `buffer` is uint8 [total_bytes] and immutable."""

    plan: ImagePlan
    buffer: torch.Tensor
    parts: tuple[ImagePart, ...]

    @property
    def sha256(self) -> bytes:
        """The trailer's hash."""
        return trailer_sha256((part.sha256 for part in self.parts), self.plan.segments)


def compile_image(checkpoint: Checkpoint, layout: Layout) -> Image:
    """Plans and compiles. Raises as `plan_image`, `measured` and `compile_parts`."""
    plan = measured(checkpoint, plan_image(checkpoint, layout))
    buffer = allocate_buffer(plan.total_bytes)
    parts = tuple(compile_parts(checkpoint, plan, buffer))
    return Image(plan.without_sources(), buffer, parts)


def compile_parts(
    checkpoint: Checkpoint,
    plan: ImagePlan,
    buffer: torch.Tensor,
    *,
    num_final: int = 0,
    threads: Executor | None = None,
) -> Generator[ImagePart]:
    """Fills `buffer` (uint8 [plan.total_bytes]) as `plan`, which has its sources and scales, says,
    and yields each part, in order, once its bytes are final. The first `num_final` parts are final
    already: they are not written and not yielded.

    With `threads`, several are filled and hashed concurrently. The image is valid only when
    the generator ends without an error: a blob's bytes are compared with its digest at the very
    end. `buffer` is no longer written to when the generator has ended or is closed.

    Raises:
        IncompatibleAdapter: CAST_OVERFLOW (subject: the tensor), a value is not finite after
            folding the scale and casting to the layout's dtype.
        CorruptData: the source differs from its digest, or got shorter.
    """
    assert plan.has_scales
    hashes: dict[str, bytes] | None = None
    if not checkpoint.is_verified:
        if _reads_all_once(checkpoint, plan.sources):
            hashes = {}
        else:
            checkpoint.verify()
    with checkpoint.open_files() as files:
        compiler = _PartCompiler(plan, buffer, files, hashes, num_final)
        parts = enumerate(_segments_by_part(plan))
        jobs = (partial(compiler.compile, index, segments) for index, segments in parts)
        try:
            for part in _in_order(jobs, threads):
                if part.index >= num_final:
                    yield part
        except IncompatibleAdapter:
            checkpoint.verify()  # a flipped bit must not look like an overflow
            raise
    if hashes is not None and checkpoint.compute_digest(hashes) != checkpoint.digest:
        raise checkpoint.corrupt()


def _in_order(
    jobs: Iterable[Callable[[], ImagePart]], threads: Executor | None
) -> Iterator[ImagePart]:
    """Yields the results of the jobs; with `threads`, a few are done at the same time."""
    if threads is None:
        for job in jobs:
            yield job()
        return
    started: deque[Future[ImagePart]] = deque()
    try:
        for job in jobs:
            started.append(threads.submit(job))
            if len(started) == PARTS_AT_ONCE:
                yield started.popleft().result()
        while started:
            yield started.popleft().result()
    finally:
        for future in started:
            future.cancel()
        wait(started)


def _reads_all_once(checkpoint: Checkpoint, sources: Iterable[SegmentSource]) -> bool:
    """Returns whether the segments are made of all saved tensors, each as a whole and once, so that
    their reads cover all bytes of the digest."""
    keys = []
    for piece in (piece for source in sources for piece in source.pieces):
        matrix = piece.matrix
        if matrix.offset != matrix.record.offset or len(matrix.record.shape) > 2:
            return False
        keys.append(matrix.record.key)
    return len(keys) == len(set(keys)) == len(checkpoint.records)


def _segments_by_part(plan: ImagePlan) -> Iterator[list[_Sourced]]:
    """Yields the segments of each part, each byte once."""
    segments = deque(zip(plan.segments, plan.sources, strict=True))
    for start, end in plan.parts:
        inside: list[_Sourced] = []
        position = start - 1
        while segments and segments[0][0].offset < end:
            segment, source = segments.popleft()
            if segment.offset > position:  # else it shares the bytes of an earlier one
                inside.append((segment, source))
                position = segment.offset
        yield inside


class _Output(NamedTuple):
    """Which columns of a saved matrix become which values of an image, transposed or not: `values`
    is [rows, columns] of integers as wide as the segment's dtype. `places` is of the matrix's rows,
    which are not transposed."""

    columns: Selection
    is_transposed: bool
    places: NDArray[np.int64] | None
    values: NDArray[Any]


class _Source(NamedTuple):
    """Rows of a saved matrix, which are read once, scaled, and become values of several pieces of a
    segment, as matrices of experts do that are saved as columns of one; of none if the rows are
    only hashed."""

    matrix: Matrix
    rows: Selection
    scale: float
    outputs: tuple[_Output, ...]


class _Rows(NamedTuple):
    """Some rows of a source: where they lie, and which of them, `kept`, become rows (or,
    transposed, columns) of its outputs from `start` on."""

    source: _Source
    num_values: int
    kept: slice | NDArray[np.int64]
    start: int
    file: str
    dtype: DataType
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class _PartCompiler:
    """Fills parts of `buffer`; threads may fill different parts at the same time. With `hashes`,
    adds the sha256 of each complete saved tensor, of which the first `num_final` parts need no
    more."""

    plan: ImagePlan
    buffer: torch.Tensor
    files: Mapping[str, OpenFile]
    hashes: dict[str, bytes] | None
    num_final: int

    def compile(self, index: int, segments: Sequence[_Sourced]) -> ImagePart:
        """Raises IncompatibleAdapter CAST_OVERFLOW, CorruptData if a file got shorter."""
        start, end = self.plan.parts[index]
        data = self.buffer[start:end].numpy()
        is_final = index < self.num_final
        if not is_final:
            _fill_gaps(data, start, segments)
        if not is_final or self.hashes is not None:
            for dtype in dict.fromkeys(source.dtype for _, source in segments):
                pieces = [each for each in segments if each[1].dtype is dtype]
                self._fill(_sources(data, start, pieces, is_final=is_final), dtype)
        return ImagePart(index, start, end, b"" if is_final else hashlib.sha256(data.data).digest())

    def _fill(self, sources: Iterable[_Source], dtype: DataType) -> None:
        """Fills pieces of segments, which are of this type."""
        all_rows = self.hashes is not None
        read = chain.from_iterable(_split(source, all_rows=all_rows) for source in sources)
        hashers: defaultdict[str, Any] = defaultdict(hashlib.sha256)
        for run in group_adjacent(read, CHUNK_BYTES):
            data = _read_bytes.take(sum(rows.length_bytes for rows in run))
            self.files[run[0].file].read_into(run[0].offset, data.data)
            if self.hashes is not None:
                position = 0
                for rows in run:
                    piece = data[position : position + rows.length_bytes]
                    hashers[rows.source.matrix.record.key].update(piece.data)
                    position += rows.length_bytes
            if run[0].source.outputs:
                _compile_run(data, run, TORCH_DTYPES[dtype])
        if self.hashes is not None:
            self.hashes.update((key, sha256.digest()) for key, sha256 in hashers.items())


def _fill_gaps(data: NDArray[np.uint8], start: int, segments: Sequence[_Sourced]) -> None:
    """Zeroes in `data`, a part's bytes, which begin at `start` of the image, the gaps without
    values; writes the prefixes of segments."""
    position = 0
    for segment, source in segments:
        begin = segment.offset - start
        data[position:begin] = 0
        position = begin + segment.length_bytes
        if source.prefix:
            data[begin:position] = 0  # pieces begin on 256 bytes
            data[begin : begin + len(source.prefix)] = np.frombuffer(source.prefix, np.uint8)
    data[position:] = 0


def _sources(
    data: NDArray[np.uint8], start: int, segments: Iterable[_Sourced], *, is_final: bool
) -> Iterator[_Source]:
    """Yields the parts of these segments, with their values in `data`, a part's bytes, which begin
    at `start` of the image; without outputs if these are final."""
    for segment, source in segments:
        saved = ((_saved_rows(piece), piece) for piece in source.pieces)
        for _, group in groupby(saved, key=_read_identity):
            members = list(group)
            outputs = []
            for _, piece in members if not is_final else ():
                begin = segment.offset - start + piece.offset
                length = math.prod(piece.shape) * source.dtype.itemsize
                values = data[begin : begin + length].view(_INTEGERS[source.dtype.itemsize])
                outputs.append(_output(piece, values.reshape(piece.shape)))
            rows, piece = members[0]
            yield _Source(piece.matrix, rows, piece.scale, tuple(outputs))


def _saved_rows(piece: Piece) -> Selection:
    """Returns which rows of the matrix, as it is saved, have values of the piece."""
    matrix = piece.matrix
    return _compose(matrix.rows, piece.columns if matrix.is_transposed else piece.rows)


def _read_identity(saved: tuple[Selection, Piece]) -> Hashable:
    """Is equal for pieces of which the same rows are read and scaled."""
    rows, piece = saved
    matrix = piece.matrix
    chosen = rows if isinstance(rows, range) else rows.tobytes()
    return matrix.record.key, matrix.offset, chosen, piece.scale


def _output(piece: Piece, values: NDArray[Any]) -> _Output:
    matrix = piece.matrix
    return _Output(
        _compose(matrix.columns, piece.rows if matrix.is_transposed else piece.columns),
        piece.is_transposed is not matrix.is_transposed,
        piece.places,
        values,
    )


def _compose(outer: range, inner: Selection) -> Selection:
    if isinstance(inner, range):
        return outer[inner.start : inner.stop : inner.step]
    return outer.start + inner * outer.step


def _split(source: _Source, *, all_rows: bool) -> Iterator[_Rows]:
    """Yields the rows to be read, a chunk at a time."""
    matrix, record = source.matrix, source.matrix.record
    num_columns = matrix.num_columns
    row_bytes = num_columns * record.dtype.itemsize
    step = max(1, CHUNK_BYTES // row_bytes)
    wanted = source.rows
    first_read, last_read = 0, 0
    if all_rows:
        last_read = record.length_bytes // row_bytes
    elif len(wanted):
        first_read, last_read = int(wanted[0]), int(wanted[-1]) + 1
    for first in range(first_read, last_read, step):
        last = min(first + step, last_read)
        kept, start = _kept_between(wanted, first, last)
        yield _Rows(
            source,
            (last - first) * num_columns,
            kept,
            start,
            record.file,
            record.dtype,
            matrix.offset + first * row_bytes,
            (last - first) * row_bytes,
        )


def _kept_between(
    wanted: Selection, first: int, last: int
) -> tuple[slice | NDArray[np.int64], int]:
    """Returns which rows of [first, last) are wanted, counted from `first`, and how many wanted
    ones come before them."""
    if isinstance(wanted, range) and wanted.step == 1:
        begin, end = max(wanted.start, first), min(wanted.stop, last)
        return slice(begin - first, max(begin, end) - first), begin - wanted.start
    indices = np.asarray(wanted)
    begin, end = np.searchsorted(indices, (first, last))
    return indices[begin:end] - first, int(begin)


def _compile_run(data: NDArray[np.uint8], run: Sequence[_Rows], dtype: torch.dtype) -> None:
    """Writes rows that were read in one go, and are scaled here in place, to their segments.

    Raises IncompatibleAdapter CAST_OVERFLOW.
    """
    values = torch.from_numpy(data).view(TORCH_DTYPES[run[0].dtype])
    sizes = [rows.num_values for rows in run]
    # fp8: torch computes on it only through a wider type.
    if values.element_size() == 1 or any(rows.source.scale != 1.0 for rows in run):
        values = values.float()
        for rows, piece in zip(run, values.split(sizes), strict=True):
            if rows.source.scale != 1.0:
                piece.mul_(rows.source.scale)
    if values.dtype is not dtype:
        cast = torch.from_numpy(_cast_bytes.take(values.numel() * dtype.itemsize)).view(dtype)
        values = cast.copy_(values)
    if not _are_finite(values):
        for rows, piece in zip(run, values.split(sizes), strict=True):
            _check_finite(rows, piece)
    integers = values.view(torch.uint8).numpy().view(_INTEGERS[dtype.itemsize])
    position = 0
    for rows in run:
        _place(rows, integers[position : position + rows.num_values])
        position += rows.num_values


def _are_finite(values: torch.Tensor) -> bool:
    """Returns whether all values are finite; also False if their sum is not, which may overflow by
    itself or, for halves, be rounded to infinity. One pass."""
    if values.dtype == torch.float8_e4m3fn:  # no sums, and no infinity
        return int((values.view(torch.uint8) & 0x7F).max()) < 0x7F
    return math.isfinite(values.sum().item())


def _kept(rows: _Rows, values: Any, columns: Selection) -> Any:
    """Returns an output's part of these rows' values, as a matrix."""
    matrix = values.reshape(-1, rows.source.matrix.num_columns)
    if isinstance(columns, range):
        return matrix[rows.kept, columns.start : columns.stop : columns.step]
    return matrix[rows.kept][:, columns]


def _check_finite(rows: _Rows, values: torch.Tensor) -> None:
    wide = values.float()
    if all(
        torch.isfinite(_kept(rows, wide, output.columns)).all() for output in rows.source.outputs
    ):
        return
    key = rows.source.matrix.record.key
    raise IncompatibleAdapter(
        f"{key}: values are not finite after scaling by {rows.source.scale:g} "
        f"and casting to {str(values.dtype).removeprefix('torch.')}",
        subject=key,
        reason="CAST_OVERFLOW",
    )


def _place(rows: _Rows, values: NDArray[Any]) -> None:
    """Copies values to their places in the segment."""
    for output in rows.source.outputs:
        kept = _kept(rows, values, output.columns)
        end = rows.start + len(kept)
        if output.places is not None:
            output.values[output.places[rows.start : end]] = kept
        elif output.is_transposed:
            _copy_transposed(kept, output.values[:, rows.start : end])
        else:
            output.values[rows.start : end] = kept


def _copy_transposed(values: NDArray[Any], output: NDArray[Any]) -> None:
    """output[:] = values.T, for two matrices of one type."""
    step = max(64, TRANSPOSE_BYTES // max(1, values.shape[1] * values.itemsize))
    for row in range(0, len(values), step):
        output[:, row : row + step] = values[row : row + step].T
