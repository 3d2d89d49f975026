"""Compiles a checkpoint into an image, part by part, and hashes the parts.

Of each segment, one saved tensor is sliced, scaled in fp32, cast and transposed. Source rows pass
through in chunks of about a megabyte, so that what is in flight stays in the processor's cache and
memory stays near the image's own size.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from adapter_store.checkpoint.files import RegularFile
from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint
from adapter_store.checkpoint.safetensors import TensorRecord
from adapter_store.core import ImagePart, Layout, Segment, SegmentKind, Target, TargetKind
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.buffers import allocate_buffer
from adapter_store.images.plan import (
    ImagePlan,
    plan_image,
)

CHUNK_BYTES = 1 << 20
TRANSPOSE_BYTES = 32 << 10
"""A transposed copy in blocks of this size stays in the first-level cache."""

# bf16 has no numpy type, and a copy needs none.
_INTEGERS = {2: torch.int16, 4: torch.int32}

_Shaped: TypeAlias = tuple[Segment, tuple[int, int]]


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
        """The trailer's hash: sha256 of the parts' sha256 values, concatenated in order."""
        return trailer_sha256(self.parts)


def trailer_sha256(parts: tuple[ImagePart, ...]) -> bytes:
    return hashlib.sha256(b"".join(part.sha256 for part in parts)).digest()


def compile_image(checkpoint: Checkpoint, layout: Layout) -> Image:
    """Plans and compiles. Raises as `plan_image` and `compile_parts`."""
    plan = plan_image(checkpoint, layout)
    buffer = allocate_buffer(plan.total_bytes)
    return Image(plan, buffer, tuple(compile_parts(checkpoint, layout, plan, buffer)))


def compile_parts(
    checkpoint: Checkpoint,
    layout: Layout,
    plan: ImagePlan,
    buffer: torch.Tensor,
    *,
    num_final: int = 0,
    threads: Executor | None = None,
) -> Generator[ImagePart]:
    """Fills `buffer` (uint8 [plan.total_bytes]) and yields each part, in order, once its bytes are
    final. The first `num_final` parts are final already: they are not written and not yielded.

    With `threads`, parts are hashed concurrently. The image is valid only when the generator ends
    without an error: a blob's bytes are compared with its digest at the very end. `buffer` is no
    longer written to when the generator has ended or is closed.

    Raises:
        IncompatibleAdapter: CAST_OVERFLOW (subject: the tensor), a value is not finite after
            folding the scale and casting to the layout's dtype.
        CorruptData: the source differs from its digest, or got shorter.
    """
    hashes: dict[str, bytes] | None = None if checkpoint.is_verified else {}
    with checkpoint.open_files() as files:

        def parts() -> Iterator[ImagePart]:
            for index, segments in enumerate(_segments_by_part(plan)):
                part = ImagePart(index, *plan.parts[index], b"")
                sources = [
                    _source(checkpoint, layout.targets[segment.target], segment.kind)
                    for segment, _ in segments
                ]
                if index >= num_final:
                    outputs = _outputs(part, segments, plan, buffer)
                    for source, output in zip(sources, outputs, strict=True):
                        compile_segment(files, source, output, hashes)
                    yield part
                elif hashes is not None:
                    for source in sources:
                        compile_segment(files, source, None, hashes)

        try:
            yield from _hashed(parts(), buffer, threads)
        except IncompatibleAdapter:
            checkpoint.verify()  # a flipped bit must not look like an overflow
            raise
    if hashes is not None and checkpoint.compute_digest(hashes) != checkpoint.digest:
        raise checkpoint.corrupt()


def _hashed(
    parts: Iterator[ImagePart], buffer: torch.Tensor, threads: Executor | None
) -> Iterator[ImagePart]:
    """Yields the parts with their sha256; with `threads`, one is hashed while the next is filled.

    More concurrency does not help: filling a part is many small steps in Python.
    """
    data = buffer.numpy().data
    waiting: tuple[ImagePart, Future[bytes]] | None = None
    try:
        for part in parts:
            if threads is None:
                yield replace(part, sha256=_sha256(data[part.start : part.end]))
                continue
            future = threads.submit(_sha256, data[part.start : part.end])
            before, waiting = waiting, (part, future)
            if before is not None:
                yield replace(before[0], sha256=before[1].result())
        if waiting is not None:
            yield replace(waiting[0], sha256=waiting[1].result())
    finally:
        if waiting is not None:
            wait([waiting[1]])


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _segments_by_part(plan: ImagePlan) -> Iterator[list[_Shaped]]:
    segments = deque(zip(plan.segments, plan.shapes, strict=True))
    for _, end in plan.parts:
        inside = []
        while segments and segments[0][0].offset < end:
            inside.append(segments.popleft())
        yield inside


def _outputs(
    part: ImagePart, segments: list[_Shaped], plan: ImagePlan, buffer: torch.Tensor
) -> list[torch.Tensor]:
    """Returns each segment's part of `buffer`, [rows, columns], and zeroes the gaps between."""
    outputs = []
    position = part.start
    for segment, shape in segments:
        buffer[position : segment.offset].zero_()
        position = segment.offset + segment.length_bytes
        values = buffer[segment.offset : position].view(TORCH_DTYPES[plan.dtype])
        outputs.append(values.view(shape))
    buffer[position : part.end].zero_()
    return outputs


def _source(checkpoint: Checkpoint, target: Target, kind: SegmentKind) -> Source:
    weights = checkpoint.targets[target.name]
    in_slice = target.in_slice or (0, target.in_features)
    if kind is SegmentKind.A:
        is_embedding = target.kind is TargetKind.EMBEDDING
        return Source(weights.a, (0, weights.rank), in_slice, is_embedding, 1.0)
    out_slice = target.out_slice or (0, target.out_features)
    return Source(weights.b, out_slice, (0, weights.rank), True, weights.scale)


@dataclass(frozen=True, slots=True)
class Source:
    """A saved tensor and how it becomes a segment: sliced, transposed or not, scaled."""

    record: TensorRecord
    rows: tuple[int, int]
    columns: tuple[int, int]
    is_transposed: bool
    scale: float


class _Scratch(threading.local):
    """Each thread's chunk of source bytes."""

    def __init__(self) -> None:
        self._data = np.empty(CHUNK_BYTES, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        return self._data[:num_bytes] if num_bytes <= CHUNK_BYTES else np.empty(num_bytes, np.uint8)


_scratch = _Scratch()


def compile_segment(
    files: Mapping[str, RegularFile],
    source: Source,
    output: torch.Tensor | None,
    hashes: dict[str, bytes] | None,
) -> None:
    """Fills `output`, if given; with `hashes`, adds the sha256 of the complete saved tensor.

    Raises IncompatibleAdapter CAST_OVERFLOW, CorruptData if the file got shorter.
    """
    record = source.record
    num_rows, num_columns = record.shape
    row_bytes = num_columns * record.dtype.itemsize
    chunk_rows = max(1, CHUNK_BYTES // row_bytes)
    sha256 = hashlib.sha256()
    first, last = (0, num_rows) if hashes is not None else source.rows
    for row in range(first, last, chunk_rows):
        end = min(row + chunk_rows, last)
        data = _scratch.take((end - row) * row_bytes)
        files[record.file].read_into(record.offset + row * row_bytes, data.data)
        if hashes is not None:
            sha256.update(data.data)
        if output is not None:
            values = torch.from_numpy(data).view(TORCH_DTYPES[record.dtype]).view(-1, num_columns)
            _place(values, row, source, output)
    if hashes is not None:
        hashes[record.key] = sha256.digest()


def _place(values: torch.Tensor, row: int, source: Source, output: torch.Tensor) -> None:
    """Writes saved rows [row, row + len(values)) to their place in `output`."""
    num_rows, num_columns = values.shape
    start, end = max(row, source.rows[0]), min(row + num_rows, source.rows[1])
    if start >= end:
        return
    piece = values
    if end - start < num_rows or source.columns != (0, num_columns):
        piece = values[start - row : end - row, slice(*source.columns)]
    if source.scale != 1.0:
        piece = piece.float() * source.scale
    elif piece.element_size() == 1:  # fp8: torch computes on it only through a wider type
        piece = piece.float()
    begin, finish = start - source.rows[0], end - source.rows[0]
    if source.is_transposed:
        piece = piece.to(output.dtype)
        _check_finite(piece, source)
        _copy_transposed(piece, output[:, begin:finish])
    else:
        part = output[begin:finish]
        part.copy_(piece)
        _check_finite(part, source)


def _check_finite(values: torch.Tensor, source: Source) -> None:
    # One pass: a sum is finite only if all values are. It may overflow by itself, or, for halves,
    # be rounded to infinity: only then check each value.
    if math.isfinite(values.sum().item()) or torch.isfinite(values).all():
        return
    raise IncompatibleAdapter(
        f"{source.record.key}: values are not finite after scaling by {source.scale:g} "
        f"and casting to {str(values.dtype).removeprefix('torch.')}",
        subject=source.record.key,
        reason="CAST_OVERFLOW",
    )


def _copy_transposed(piece: torch.Tensor, output: torch.Tensor) -> None:
    """output[:] = piece.T, for two tensors of one type."""
    integers = _INTEGERS[piece.element_size()]
    rows, columns = piece.view(integers).numpy(), output.view(integers).numpy()
    step = max(64, TRANSPOSE_BYTES // max(1, piece.shape[1] * piece.element_size()))
    for row in range(0, len(rows), step):
        columns[:, row : row + step] = rows[row : row + step].T
