"""One pass over the weights: the sha256 of every tensor, and no value that is not finite."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adapter_store.checkpoint_files import RegularFile
from adapter_store.checkpoint_targets import TensorRecord
from adapter_store.core import DataType
from adapter_store.errors import InvalidAdapter

CHUNK_BYTES = 1 << 20
"""What is in flight per thread; small enough to stay in its cache between hash and check."""

MAX_THREADS = 4

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


def scan_tensors(folder: Path, records: Sequence[TensorRecord]) -> dict[str, bytes]:
    """sha256 of the raw bytes of each tensor, by its key.

    Raises InvalidAdapter NOT_FINITE (subject: the tensor), CorruptData if a file got shorter.
    """
    with ExitStack() as stack:
        names = sorted({record.file for record in records})
        files = {name: stack.enter_context(RegularFile(folder, name)) for name in names}
        threads = min(MAX_THREADS, os.cpu_count() or 1, len(records))
        with ThreadPoolExecutor(threads, "scan") as pool:
            digests = list(pool.map(partial(_scan_one, files), records))
    return {record.key: digest for record, digest in zip(records, digests, strict=True)}


def all_finite(data: NDArray[np.uint8], dtype: DataType) -> bool:
    """Whether all values in raw bytes of `dtype` are finite."""
    unsigned, mask, limit = _NOT_FINITE[dtype]
    values = data.view(unsigned)
    return values.size == 0 or int((values & unsigned(mask)).max()) < limit


def _scan_one(files: Mapping[str, RegularFile], record: TensorRecord) -> bytes:
    buffer = np.empty(min(CHUNK_BYTES, record.length_bytes), np.uint8)
    sha256 = hashlib.sha256()
    for start in range(0, record.length_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, record.length_bytes - start)]
        files[record.file].read_into(record.offset + start, chunk.data)
        sha256.update(chunk.data)
        if not all_finite(chunk, record.dtype):
            raise InvalidAdapter(
                f"{record.key}: holds NaN or infinite values",
                subject=record.key,
                reason="NOT_FINITE",
            )
    return sha256.digest()
