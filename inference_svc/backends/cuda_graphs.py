"""Decode steps of fixed sizes, recorded once and replayed: one launch in place of hundreds."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch

from inference_svc.backends.cuda_lora import StepKind

logger = logging.getLogger(__name__)

Compute = Callable[[], None]


class Recorded(Protocol):
    """One computation over fixed addresses: its inputs and outputs stay in place."""

    def replay(self) -> None:
        """Computes it from the present inputs."""


Record = Callable[[Compute], Recorded]


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: they replay one at a time. The pool ends with
    the last of them, and the next one begins another."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self, compute: Compute) -> Recorded:
        # Once outside: compiles kernels, and lets libraries make their lasting allocations.
        compute()
        torch.cuda.current_stream().synchronize()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._graphs.add(graph)
        return graph


class CapturedSteps:
    """`compute(size, kind)` computes a decode step of `size` rows from fixed addresses."""

    def __init__(
        self, sizes: Sequence[int], compute: Callable[[int, StepKind], None], record: Record
    ) -> None:
        self._sizes = sorted(sizes)
        self._compute = compute
        self._record = record
        self._recorded: dict[tuple[int, StepKind], Recorded] = {}

    def size_for(self, num_rows: int) -> int | None:
        """Returns the smallest size that holds so many rows; None if none does."""
        index = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def record_all(self) -> None:
        """Records all sizes, the largest first: the smaller ones then reuse its memory."""
        started_s = time.monotonic()
        for size in reversed(self._sizes):
            for kind in reversed(StepKind):
                self._find(size, kind)
        logger.info(
            "recorded decode steps of %s rows in %.1f s", self._sizes, time.monotonic() - started_s
        )

    def replay(self, size: int, kind: StepKind) -> None:
        """Computes the recorded step."""
        self._find(size, kind).replay()

    def _find(self, size: int, kind: StepKind) -> Recorded:
        key = (size, kind)
        if key not in self._recorded:
            self._recorded[key] = self._record(lambda: self._compute(size, kind))
        return self._recorded[key]


def captured_sizes(max_rows: int) -> list[int]:
    """Returns sizes up to `max_rows`: 1, 2, 4, 8, then such that waste at most a third."""
    sizes = {1, 2, 4, max_rows}
    power = 8
    while power < max_rows:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return sorted(size for size in sizes if size <= max_rows)
