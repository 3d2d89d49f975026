"""Ranks of one process: a thread each, which exchange through its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from inference_svc.store.client import NoStore

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadExchange:
    """An `Exchange` of the rank with this index."""

    index: int
    values: list[Tensor | None]
    barrier: threading.Barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self.values[self.index] = x.clone()
        self.barrier.wait(60)
        found = [each for each in self.values if each is not None]
        self.barrier.wait(60)
        return found

    def sum(self, x: Tensor) -> None:
        x.copy_(torch.stack([each.double() for each in self._all(x)]).sum(dim=0))

    def side_by_side(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), dim=1)


def exchanges(count: int) -> list[ThreadExchange]:
    values: list[Tensor | None] = [None] * count
    barrier = threading.Barrier(count)
    return [ThreadExchange(index, values, barrier) for index in range(count)]


def on_ranks(count: int, run: Callable[[int], T]) -> Sequence[T]:
    """Runs a function for each rank at the same time; returns the results in their order."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def no_store(publish: Callable[[object], None]) -> NoStore:
    """Makes the store of a rank that pulls nothing."""
    return NoStore()
