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
        self._sum = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A weak reference keeps the place of its storage: no other has the same number.
        new = {each._cdata: each for each in _storages((result,)) if each._cdata not in self._live}
        if new:
            given = {each._cdata for each in _storages((args, kwargs or {}))}
            for number in new.keys() - given:
                self._live[number] = StorageWeakRef(new[number]), new[number].nbytes()
                self._sum += new[number].nbytes()
        # The sum has memory that is gone, too: it is counted anew only where that may matter.
        if self._sum > self.peak:
            self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
            self._sum = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._sum)
        return result


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors_in(values)]


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    with torch.inference_mode(), LiveBytes() as live:
        yield live
