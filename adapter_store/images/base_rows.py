"""Which rows of the base's own weights an adapter changes, of those that it has saved along.

Trainers save whole embeddings and heads, also where they have not changed them. The layout has the
sha256 of each HASHED_ROWS rows of the base's weight, in the dtype of the base's checkpoint; what is
equal is dropped, a copy that was saved wider is narrowed first, if that loses nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from adapter_store.checkpoint.files import RegularFile
from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint
from adapter_store.checkpoint.weights import Replacement
from adapter_store.core import HASHED_ROWS, Target

MAX_KEPT_AS_ROWS = 0.5
"""Share of the base's rows from which on the whole weight is kept."""
MAX_CACHED = 64


class Kept(NamedTuple):
    """What an adapter changes of a weight of the base: (row of the saved tensor, row of the base)
    each, by rows of the base, or all of it."""

    rows: tuple[tuple[int, int], ...] = ()
    is_whole: bool = False


_cache: OrderedDict[tuple[str, str, tuple[bytes, ...]], Kept] = OrderedDict()
"""A weight of a gigabyte takes a second to compare, and is planned for again and again."""


def kept_rows(checkpoint: Checkpoint, replacement: Replacement, target: Target) -> Kept:
    """Compares with the base's hashes. Raises CorruptData if a file got shorter."""
    if replacement.row_ids is not None:
        rows = enumerate(replacement.row_ids)
        return Kept(tuple(sorted(rows, key=lambda row: row[1])))
    key = (checkpoint.digest, replacement.record.key, target.base_hashes)
    found = _cache.pop(key, None)
    if found is None:
        found = _compare(checkpoint, replacement, target)
    _cache[key] = found
    while len(_cache) > MAX_CACHED:
        _cache.popitem(last=False)
    return found


def _compare(checkpoint: Checkpoint, replacement: Replacement, target: Target) -> Kept:
    num_saved = (1, *replacement.record.shape)[-2]
    added = range(target.num_rows, num_saved)
    if not target.base_hashes:
        every = tuple((row, row) for row in range(num_saved))
        return Kept(every) if added else Kept(every, is_whole=True)
    changed = [*_changed(checkpoint, replacement, target), *added]
    is_whole = not added and len(changed) > MAX_KEPT_AS_ROWS * target.num_rows
    return Kept(tuple((row, row) for row in changed), is_whole)


def _changed(checkpoint: Checkpoint, replacement: Replacement, target: Target) -> Iterator[int]:
    """Yields the rows of blocks that differ from the base's."""
    record = replacement.record
    assert target.base_dtype is not None
    narrow = TORCH_DTYPES[target.base_dtype]
    row_bytes = record.length_bytes // (1, *record.shape)[-2]
    with RegularFile(checkpoint.folder, record.file) as file:
        for block, expected in enumerate(target.base_hashes):
            first = block * HASHED_ROWS
            last = min(first + HASHED_ROWS, target.num_rows)
            data = file.read_at(record.offset + first * row_bytes, (last - first) * row_bytes)
            saved = torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[record.dtype])
            base = saved.to(narrow)
            is_lossless = torch.equal(base.to(saved.dtype), saved)
            sha256 = hashlib.sha256(base.view(torch.uint8).numpy().data).digest()
            if not is_lossless or sha256 != expected:
                yield from range(first, last)
