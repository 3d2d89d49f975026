"""The memory that operations of torch allocate, and that is still there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_model.launches import tensors_in


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all memory that operations of torch allocate and that is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each._cdata for each in _storages((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
        for storage in _storages((result,)):
            if storage._cdata not in given and storage._cdata not in self._live:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors_in(values)]


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    with torch.inference_mode(), LiveBytes() as live:
        yield live
