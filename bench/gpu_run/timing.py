"""Measures microseconds on the device, and seconds on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

MIN_REPLAYS, MAX_REPLAYS = 5, 20


class Times(NamedTuple):
    """Microseconds per call."""

    best_us: float
    median_us: float


class Timer(Protocol):
    """Measures work on the device."""

    name: str
    """The source of the times, for the results."""

    def time_us(self, run: Callable[[], None], num_calls: int, max_s: float = 0.2) -> Times:
        """Times one call of `run`, which makes `num_calls`; repeats it for up to `max_s`."""

    def now_s(self) -> float:
        """Reads the host's clock."""

    def synchronize(self) -> None:
        """Waits for the device."""


class GraphTimer:
    """Times replays of one recorded graph, so that the host's time does not count."""

    name = "replays of a CUDA graph, CUDA events; the host's monotonic clock"

    def time_us(self, run: Callable[[], None], num_calls: int, max_s: float = 0.2) -> Times:
        run()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        found: list[float] = []
        end_s = self.now_s() + max_s
        while len(found) < MIN_REPLAYS or (len(found) < MAX_REPLAYS and self.now_s() < end_s):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / num_calls)
        return Times(min(found), statistics.median(found))

    def now_s(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class FakeTimer:
    """Runs everything once and reports meaningless durations: a millisecond for each reading."""

    name = "FAKE: emulated, every duration is made up"

    def __init__(self) -> None:
        self._now_s = 0.0

    def time_us(self, run: Callable[[], None], num_calls: int, max_s: float = 0.2) -> Times:
        run()
        return Times(1000.0, 1000.0)

    def now_s(self) -> float:
        self._now_s += 1e-3
        return self._now_s

    def synchronize(self) -> None:
        """Does nothing, because there is no device."""


class Deadline:
    """The end of a stage's time, by the real clock."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def is_near(self, margin_s: float = 0.0) -> bool:
        """Returns whether `margin_s` or less is left."""
        return self.left_s <= margin_s
