"""Compiles one saved tensor into one segment: slices, folds the scale in fp32, casts, transposes.

Source rows pass through in chunks of about a megabyte, so that what is in flight stays in the
processor's cache and memory stays near the image's own size.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from adapter_store.checkpoint.files import RegularFile
from adapter_store.checkpoint.open import TORCH_DTYPES, TensorRecord
from adapter_store.errors import IncompatibleAdapter

CHUNK_BYTES = 1 << 20
TRANSPOSE_BYTES = 32 << 10
"""Read and written in blocks of this size, a transposed copy stays in the first-level cache."""

# bf16 has no numpy type, and a copy needs none.
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Source:
    """How a saved tensor becomes a segment: cut to rows and columns, transposed or not, scaled."""

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
    """Fills `output`, if given; with `hashes`, notes the sha256 of the whole saved tensor.

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
    """Puts saved rows [row, row + len(values)) where they belong in `output`."""
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
    # be rounded to infinity: only then look again.
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
