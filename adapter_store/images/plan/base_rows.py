"""Which rows of the base's own weights an adapter changes, among the rows that it has saved along.

Trainers save whole embeddings and heads, also where they have not changed them. The layout has the
sha256 of each HASHED_ROWS rows of the base's weight, in the dtype of the base's checkpoint; equal
rows are dropped, a copy that was saved wider is narrowed first, if that loses nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch

from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint
from adapter_store.checkpoint.reading.files import open_file
from adapter_store.checkpoint.weights import Replacement
from contract.images.dtypes import DataType
from contract.images.targets import HASHED_ROWS, Target

MAX_KEPT_AS_ROWS = 0.5
"""Share of the base's rows from which on the whole weight is kept."""
MAX_CACHED = 64


class Kept(NamedTuple):
    """The changes of a weight of the base by an adapter: (row of the saved tensor, row of the base)
    each, by rows of the base, or all of it."""

    rows: tuple[tuple[int, int], ...] = ()
    is_whole: bool = False


_Key: TypeAlias = tuple[str, str, DataType | None, tuple[bytes, ...]]
_changed_blocks: OrderedDict[_Key, tuple[int, ...]] = OrderedDict()
"""A weight of a gigabyte takes a second to compare, and is planned for again and again. Of the last
MAX_CACHED, the numbers of the blocks that differ, some hundreds each."""
_changed_lock = threading.Lock()


def kept_rows(checkpoint: Checkpoint, replacement: Replacement, target: Target) -> Kept:
    """Compares with the base's hashes. Raises CorruptData if a file got shorter."""
    if replacement.row_ids is not None:
        rows = enumerate(replacement.row_ids)
        return Kept(tuple(sorted(rows, key=lambda row: row[1])))
    num_rows, num_saved = target.num_rows, (1, *replacement.record.shape)[-2]
    if not num_rows:  # of the adapter's own size
        return Kept(is_whole=True)
    changed: list[int] = list(range(num_rows))
    if target.base_hashes:
        changed = [
            row
            for block in _find_changed_blocks(checkpoint, replacement, target)
            for row in range(block * HASHED_ROWS, min((block + 1) * HASHED_ROWS, num_rows))
        ]
    if num_saved == num_rows and len(changed) > MAX_KEPT_AS_ROWS * num_rows:
        return Kept(is_whole=True)
    return Kept(tuple((row, row) for row in (*changed, *range(num_rows, num_saved))))


def _find_changed_blocks(
    checkpoint: Checkpoint, replacement: Replacement, target: Target
) -> tuple[int, ...]:
    key = (checkpoint.digest, replacement.record.key, target.base_dtype, target.base_hashes)
    with _changed_lock:
        found = _changed_blocks.get(key)
    if found is None:
        found = tuple(_compare(checkpoint, replacement, target))
    with _changed_lock:
        _changed_blocks[key] = found
        _changed_blocks.move_to_end(key)
        while len(_changed_blocks) > MAX_CACHED:
            _changed_blocks.popitem(last=False)
    return found


def _compare(checkpoint: Checkpoint, replacement: Replacement, target: Target) -> Iterator[int]:
    """Yields the blocks of rows that differ from the base's."""
    record = replacement.record
    assert target.base_dtype is not None
    narrow = TORCH_DTYPES[target.base_dtype]
    row_bytes = record.length_bytes // (1, *record.shape)[-2]
    with open_file(checkpoint.folder, record.file) as file:
        for block, expected in enumerate(target.base_hashes):
            first = block * HASHED_ROWS
            last = min(first + HASHED_ROWS, target.num_rows)
            data = file.read_at(record.offset + first * row_bytes, (last - first) * row_bytes)
            saved = torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[record.dtype])
            base = saved.to(narrow)
            is_lossless = torch.equal(base.to(saved.dtype), saved)
            sha256 = hashlib.sha256(base.view(torch.uint8).numpy().data).digest()
            if not is_lossless or sha256 != expected:
                yield block
