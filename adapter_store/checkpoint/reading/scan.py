"""One pass over the weights: the sha256 of every tensor, how large its values are, and none that is
not finite."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from adapter_store.checkpoint.reading.files import AnyFolder, OpenFile, Scratch, open_file
from adapter_store.checkpoint.reading.safetensors import Scanned, TensorRecord, group_adjacent
from adapter_store.errors import InvalidAdapter
from contract.images.dtypes import DataType

CHUNK_BYTES = 1 << 20
"""The bytes in flight per thread, which stay in the processor's cache between hash and check."""

MAX_THREADS = 4

SUSPECT = 0.25
"""Values up to this size need not be told apart: no adapter is too large with them."""

_TORCH_DTYPES = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DataType.FLOAT8_E5M2: torch.float8_e5m2,
}
_COMPARED = (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)
"""The types that torch finds the largest of."""

# A value is infinite or NaN if its exponent bits are all ones (E4M3, which has no infinity: if all
# its bits are): the integer type to view it as, the mask without the sign, and the smallest masked
# value that is not finite.
_NOT_FINITE: dict[DataType, tuple[type[np.unsignedinteger], int, int]] = {
    DataType.FLOAT32: (np.uint32, 0x7FFFFFFF, 0x7F800000),
    DataType.FLOAT16: (np.uint16, 0x7FFF, 0x7C00),
    DataType.BFLOAT16: (np.uint16, 0x7FFF, 0x7F80),
    DataType.FLOAT8_E4M3: (np.uint8, 0x7F, 0x7F),
    DataType.FLOAT8_E5M2: (np.uint8, 0x7F, 0x7C),
}


_scratch = Scratch(CHUNK_BYTES)


def scan_tensors(folder: AnyFolder, records: Sequence[TensorRecord]) -> dict[str, Scanned]:
    """Returns the findings about each tensor, by its key. Of small ones that lie side by side the
    largest magnitude may be the largest of all, up to SUSPECT.

    Raises InvalidAdapter NOT_FINITE (subject: the tensor), CorruptData if a file got shorter.
    """
    with ExitStack() as stack:
        names = sorted({record.file for record in records})
        files: dict[str, OpenFile] = {}
        for name in names:
            file = files[name] = open_file(folder, name)
            stack.callback(file.close)
        runs = group_adjacent(records, CHUNK_BYTES)
        threads = min(MAX_THREADS, os.cpu_count() or 1, len(runs))
        with ThreadPoolExecutor(threads, "scan") as pool:
            scanned = list(pool.map(partial(_scan_run, files), runs))
    return {key: each for found in scanned for key, each in found.items()}


def largest_of(data: NDArray[np.uint8], dtype: DataType) -> float:
    """Returns the largest magnitude among the values in raw bytes of `dtype`: infinite, or NaN, if
    one of them is not finite."""
    if data.flags.writeable and dtype in _COMPARED:  # torch takes no others
        least, most = torch.aminmax(torch.from_numpy(data).view(_TORCH_DTYPES[dtype]))
        return max(most.item(), -least.item(), key=_nan_first)
    if dtype is DataType.FLOAT32:
        values = data.view(np.float32)
        return max(float(values.max()), -float(values.min()), key=_nan_first)
    return _largest_by_bits(data, dtype)


def _nan_first(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _largest_by_bits(data: NDArray[np.uint8], dtype: DataType) -> float:
    """Returns the same: without their signs the bits of numbers are in their order."""
    unsigned, mask, limit = _NOT_FINITE[dtype]
    bits = (data.view(unsigned) & unsigned(mask)).max()
    if int(bits) >= limit:
        return math.inf
    return torch.from_numpy(np.array([bits])).view(_TORCH_DTYPES[dtype]).float().item()


def _scan_run(files: Mapping[str, OpenFile], run: list[TensorRecord]) -> dict[str, Scanned]:
    first = run[0]
    if len(run) == 1:
        return {first.key: _scan_one(files[first.file], first)}
    data = _scratch.take(sum(record.length_bytes for record in run))
    files[first.file].read_into(first.offset, data.data)
    found = {}
    largest = largest_of(data, first.dtype)
    for record in run:
        start = record.offset - first.offset
        piece = data[start : start + record.length_bytes]
        own = largest if largest <= SUSPECT else largest_of(piece, record.dtype)
        if not math.isfinite(own):
            raise _not_finite(record)
        found[record.key] = Scanned(hashlib.sha256(piece.data).digest(), own)
    return found


def read_largest(file: OpenFile, record: TensorRecord) -> float:
    """Returns the largest magnitude in a tensor: infinite, or NaN, if a value is not finite. Raises
    CorruptData if the file got shorter."""
    return max(
        (largest_of(chunk, record.dtype) for chunk in _chunks(file, record)),
        default=0.0,
        key=_nan_first,
    )


def _chunks(file: OpenFile, record: TensorRecord) -> Iterator[NDArray[np.uint8]]:
    """Yields the tensor's bytes, each chunk in the place of the one before."""
    buffer = _scratch.take(min(CHUNK_BYTES, record.length_bytes))
    for start in range(0, record.length_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, record.length_bytes - start)]
        file.read_into(record.offset + start, chunk.data)
        yield chunk


def _scan_one(file: OpenFile, record: TensorRecord) -> Scanned:
    sha256, largest = hashlib.sha256(), 0.0
    for chunk in _chunks(file, record):
        sha256.update(chunk.data)
        found = largest_of(chunk, record.dtype)
        if not math.isfinite(found):
            raise _not_finite(record)
        largest = max(largest, found)
    return Scanned(sha256.digest(), largest)


def _not_finite(record: TensorRecord) -> InvalidAdapter:
    return InvalidAdapter(
        f"{record.key}: contains NaN or infinite values", subject=record.key, reason="NOT_FINITE"
    )
