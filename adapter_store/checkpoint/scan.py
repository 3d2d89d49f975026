"""One pass over the weights: the sha256 of every tensor, and no value that is not finite."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from adapter_store.checkpoint.files import Folder, OpenFile, Scratch, open_file
from adapter_store.checkpoint.safetensors import TensorRecord, group_adjacent
from adapter_store.core import DataType
from adapter_store.errors import InvalidAdapter

CHUNK_BYTES = 1 << 20
"""The bytes in flight per thread, which stay in the processor's cache between hash and check."""

MAX_THREADS = 4

_TORCH_DTYPES = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
}
"""The types that torch can sum."""

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


def scan_tensors(folder: Folder, records: Sequence[TensorRecord]) -> dict[str, bytes]:
    """Returns the sha256 of the raw bytes of each tensor, by its key.

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
    return {key: sha256 for found in scanned for key, sha256 in found.items()}


def all_finite(data: NDArray[np.uint8], dtype: DataType) -> bool:
    """Returns whether all values in raw bytes of `dtype` are finite."""
    # One pass in the common case: a sum is finite only if all values are.
    if not data.flags.writeable:  # torch takes no others
        if dtype is DataType.FLOAT32:
            with np.errstate(over="ignore", invalid="ignore"):
                if math.isfinite(data.view(np.float32).sum()):
                    return True
        return _none_infinite(data, dtype)
    summable = _TORCH_DTYPES.get(dtype)
    if summable is not None and math.isfinite(torch.from_numpy(data).view(summable).sum().item()):
        return True
    return _none_infinite(data, dtype)


def _none_infinite(data: NDArray[np.uint8], dtype: DataType) -> bool:
    """Returns the same by looking at each value."""
    unsigned, mask, limit = _NOT_FINITE[dtype]
    return int((data.view(unsigned) & unsigned(mask)).max(initial=0)) < limit


def _scan_run(files: Mapping[str, OpenFile], run: list[TensorRecord]) -> dict[str, bytes]:
    first = run[0]
    if len(run) == 1:
        return {first.key: _scan_one(files[first.file], first)}
    data = _scratch.take(sum(record.length_bytes for record in run))
    files[first.file].read_into(first.offset, data.data)
    found = {}
    is_finite = all_finite(data, first.dtype)
    for record in run:
        start = record.offset - first.offset
        piece = data[start : start + record.length_bytes]
        found[record.key] = hashlib.sha256(piece.data).digest()
        if not is_finite and not all_finite(piece, record.dtype):
            raise _not_finite(record)
    return found


def _scan_one(file: OpenFile, record: TensorRecord) -> bytes:
    buffer = _scratch.take(min(CHUNK_BYTES, record.length_bytes))
    sha256 = hashlib.sha256()
    for start in range(0, record.length_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, record.length_bytes - start)]
        file.read_into(record.offset + start, chunk.data)
        sha256.update(chunk.data)
        if not all_finite(chunk, record.dtype):
            raise _not_finite(record)
    return sha256.digest()


def _not_finite(record: TensorRecord) -> InvalidAdapter:
    return InvalidAdapter(
        f"{record.key}: holds NaN or infinite values", subject=record.key, reason="NOT_FINITE"
    )
