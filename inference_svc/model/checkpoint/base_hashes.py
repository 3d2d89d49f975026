"""Hashes the base's weights that trainers save with adapters: embedding, head, norms and biases.

By these hashes a store distinguishes an adapter's own weights from copies of the base's. They are
of the checkpoint's own bytes, before anything is cast, fused or quantised: sha256 of each
HASHED_ROWS rows, of a vector of all of it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from contract.images.dtypes import DataType
from contract.images.targets import HASHED_ROWS
from inference_svc.model.checkpoint.headers import PIECE_BYTES, StoredTensor, stored_tensors
from inference_svc.model.checkpoint.parameters import vectors
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD, Decoder

logger = logging.getLogger(__name__)

MAX_THREADS = 4
_DTYPES = {dtype.value: dtype for dtype in DataType if dtype.is_computable}
"""Dtypes that hashes can be announced of, by their names in safetensors."""


@dataclass(frozen=True, slots=True)
class BaseHashes:
    """A weight's dtype in the checkpoint, and the sha256 of its blocks of rows."""

    dtype: DataType
    sha256: tuple[bytes, ...]


HashesByName: TypeAlias = dict[str, BaseHashes]
"""By the names that adapters have the weights under."""


@contextmanager
def hashing_base(
    model_dir: Path, decoder: Decoder, num_threads: int
) -> Iterator[Callable[[], HashesByName]]:
    """Hashes the weights of a model's folder in threads while the context's body runs, which gets a
    function that waits for the hashes, and raises OSError if a file became shorter. Hashes that are
    not done when the body ends are not made any more.

    Raises UnsupportedModel for a file that is not of safetensors.
    """
    start_s = time.monotonic()
    tensors = _find_tensors(model_dir, decoder)
    with ThreadPoolExecutor(min(num_threads, MAX_THREADS), "loadout-hash") as threads:
        blocks = {
            tensor: [threads.submit(_hash, tensor.path, *block) for block in _blocks_of(tensor)]
            for tensor in dict.fromkeys(tensors.values())  # a tied head is there once
        }

        def wait() -> HashesByName:
            hashes = {
                tensor: BaseHashes(_DTYPES[tensor.dtype], tuple(each.result() for each in parts))
                for tensor, parts in blocks.items()
            }
            seconds = round(time.monotonic() - start_s, 3)
            num_bytes = sum(tensor.num_bytes for tensor in hashes)
            facts = {"bytes": num_bytes, "seconds": seconds}
            logger.info("hashed the base's embedding, head, norms and biases", extra=facts)
            return {name: hashes[tensor] for name, tensor in tensors.items()}

        try:
            yield wait
        finally:
            threads.shutdown(cancel_futures=True)


def _find_tensors(model_dir: Path, decoder: Decoder) -> dict[str, StoredTensor]:
    """Returns the weights that can be hashed, by their names in adapters. A tied head is the
    embedding, also if the file has a head."""
    stored = {decoder.wrapper.text_name(name): each for name, each in stored_tensors(model_dir)}
    embedding = f"{EMBED_TOKENS}.weight"
    head = embedding if decoder.head.is_tied else f"{LM_HEAD}.weight"
    names = {EMBED_TOKENS: embedding, LM_HEAD: head}
    names |= {vector.name: vector.tensor for vector in vectors(decoder)}
    return {
        name: stored[tensor]
        for name, tensor in names.items()
        if tensor in stored and stored[tensor].dtype in _DTYPES
    }


def _blocks_of(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yields where each block of rows starts in the file, and its size."""
    num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    row_bytes = tensor.num_bytes // max(1, num_rows)
    for first in range(0, num_rows, HASHED_ROWS):
        rows = min(HASHED_ROWS, num_rows - first)
        yield tensor.start + first * row_bytes, rows * row_bytes


def _hash(path: Path, start: int, num_bytes: int) -> bytes:
    """Hashes a part of a file, a piece at a time; other threads run meanwhile."""
    sha256 = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_bytes:
            piece = file.read(min(num_bytes, PIECE_BYTES))
            if not piece:
                raise OSError(f"{path} has become shorter")
            sha256.update(piece)
            num_bytes -= len(piece)
    return sha256.digest()
