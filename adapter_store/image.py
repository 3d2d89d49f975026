"""Compiles a checkpoint into an image: slices, transposes, folds the scale, casts, hashes.

B is scaled in fp32 before the cast. Source rows pass through in chunks of about a megabyte, so
that what is in flight stays in the processor's cache and memory stays near the image's own size.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from adapter_store.checkpoint import TORCH_DTYPES, Checkpoint, TensorRecord
from adapter_store.checkpoint_files import RegularFile
from adapter_store.core import ImagePart, Layout, SegmentKind, Target, TargetKind
from adapter_store.errors import IncompatibleAdapter
from adapter_store.image_plan import (
    COMPILER_REVISION,
    IMAGE_FORMAT,
    IMAGE_FORMATS,
    ImagePlan,
    image_id,
    plan_image,
)

__all__ = [
    "COMPILER_REVISION",
    "IMAGE_FORMAT",
    "IMAGE_FORMATS",
    "Image",
    "ImagePlan",
    "allocate_buffer",
    "compile_image",
    "compile_parts",
    "image_id",
    "plan_image",
    "trailer_sha256",
]

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An adapter's bytes for one layout. `buffer` is uint8 [total_bytes]; nobody changes it."""

    plan: ImagePlan
    buffer: torch.Tensor
    parts: tuple[ImagePart, ...]

    @property
    def sha256(self) -> bytes:
        """What the trailer says: sha256 of the parts' sha256 values, concatenated in order."""
        return trailer_sha256(self.parts)


@dataclass(frozen=True, slots=True)
class _Source:
    """How a saved tensor becomes a segment: cut to rows and columns, transposed or not, scaled."""

    record: TensorRecord
    rows: tuple[int, int]
    columns: tuple[int, int]
    is_transposed: bool
    scale: float


def trailer_sha256(parts: tuple[ImagePart, ...]) -> bytes:
    return hashlib.sha256(b"".join(part.sha256 for part in parts)).digest()


def allocate_buffer(total_bytes: int) -> torch.Tensor:
    """uint8 [total_bytes], not initialised; pinned where CUDA is, so that devices copy from it."""
    return torch.empty(total_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def compile_image(
    checkpoint: Checkpoint, layout: Layout, *, base_model: str | None = None
) -> Image:
    """Plans and compiles. Raises as `plan_image` and `compile_parts`."""
    plan = plan_image(checkpoint, layout, base_model=base_model)
    buffer = allocate_buffer(plan.total_bytes)
    return Image(plan, buffer, tuple(compile_parts(checkpoint, layout, plan, buffer)))


def compile_parts(
    checkpoint: Checkpoint, layout: Layout, plan: ImagePlan, buffer: torch.Tensor
) -> Iterator[ImagePart]:
    """Fills `buffer` (uint8 [plan.total_bytes]) and yields each part once its bytes are final.

    The image is good only when the generator ends without an error: a blob's bytes are compared
    with its digest at the very end.

    Raises:
        IncompatibleAdapter: CAST_OVERFLOW (subject: the tensor), a value is not finite after
            folding the scale and casting to the layout's dtype.
        CorruptData: the source differs from its digest, or got shorter.
    """
    hashes: dict[str, bytes] | None = None if checkpoint.is_verified else {}
    with checkpoint.open_files() as files:
        segments = deque(zip(plan.segments, plan.shapes, strict=True))
        for index, (start, end) in enumerate(plan.parts):
            position = start
            while segments and segments[0][0].offset < end:
                segment, shape = segments.popleft()
                buffer[position : segment.offset].zero_()
                position = segment.offset + segment.length_bytes
                output = buffer[segment.offset : position]
                source = _source(checkpoint, layout.targets[segment.target], segment.kind)
                output = output.view(TORCH_DTYPES[plan.dtype]).view(shape)
                try:
                    _compile_segment(files, source, output, hashes)
                except IncompatibleAdapter:
                    checkpoint.verify()  # a flipped bit must not look like an overflow
                    raise
            buffer[position:end].zero_()
            sha256 = hashlib.sha256(buffer[start:end].numpy().data).digest()
            yield ImagePart(index, start, end, sha256)
    if hashes is not None and checkpoint.compute_digest(hashes) != checkpoint.digest:
        raise checkpoint.corrupt()


def _source(checkpoint: Checkpoint, target: Target, kind: SegmentKind) -> _Source:
    weights = checkpoint.targets[target.name]
    in_slice = target.in_slice or (0, target.in_features)
    if kind is SegmentKind.A:
        is_embedding = target.kind is TargetKind.EMBEDDING
        return _Source(weights.a, (0, weights.rank), in_slice, is_embedding, 1.0)
    out_slice = target.out_slice or (0, target.out_features)
    return _Source(weights.b, out_slice, (0, weights.rank), True, weights.scale)


def _compile_segment(
    files: Mapping[str, RegularFile],
    source: _Source,
    output: torch.Tensor,
    hashes: dict[str, bytes] | None,
) -> None:
    """Fills `output`; with `hashes`, notes the sha256 of the whole saved tensor."""
    record = source.record
    num_rows, num_columns = record.shape
    row_bytes = num_columns * record.dtype.itemsize
    chunk_rows = max(1, CHUNK_BYTES // row_bytes)
    buffer = np.empty(min(chunk_rows, num_rows) * row_bytes, np.uint8)
    sha256 = hashlib.sha256()
    first, last = (0, num_rows) if hashes is not None else source.rows
    for row in range(first, last, chunk_rows):
        end = min(row + chunk_rows, last)
        data = buffer[: (end - row) * row_bytes]
        files[record.file].read_into(record.offset + row * row_bytes, data.data)
        if hashes is not None:
            sha256.update(data.data)
        values = torch.from_numpy(data).view(TORCH_DTYPES[record.dtype]).view(-1, num_columns)
        _place(values, row, source, output)
    if hashes is not None:
        hashes[record.key] = sha256.digest()


def _place(values: torch.Tensor, row: int, source: _Source, output: torch.Tensor) -> None:
    """Puts saved rows [row, row + len(values)) where they belong in `output`."""
    start, end = max(row, source.rows[0]), min(row + len(values), source.rows[1])
    if start >= end:
        return
    piece = values[start - row : end - row, slice(*source.columns)]
    if source.scale != 1.0:
        piece = piece.float() * source.scale
    elif piece.element_size() == 1:  # fp8: torch computes on it only through a wider type
        piece = piece.float()
    piece = piece.to(output.dtype)
    if not torch.stack(torch.aminmax(piece)).isfinite().all():  # both are NaN if any value is
        raise IncompatibleAdapter(
            f"{source.record.key}: values are not finite after scaling by {source.scale:g} "
            f"and casting to {str(output.dtype).removeprefix('torch.')}",
            subject=source.record.key,
            reason="CAST_OVERFLOW",
        )
    begin, finish = start - source.rows[0], end - source.rows[0]
    if source.is_transposed:
        output[:, begin:finish].copy_(piece.t())
    else:
        output[begin:finish].copy_(piece)
