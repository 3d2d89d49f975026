"""Steps of fixed sizes, recorded once and replayed: one launch in place of hundreds."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch

from inference_svc.backends.cuda.padded_sizes import StepShape
from inference_svc.backends.exchange import ExchangeFailed
from inference_svc.host.device_faults import find_fault, is_out_of_memory

logger = logging.getLogger(__name__)

LATEST_USE = 4
"""The use at which a step with prompts is recorded if there was no time before."""
IDLE_STEPS = 2000
"""Steps with prompts after which an unused recording makes room for another."""

Compute = Callable[[], None]


class Recorded(Protocol):
    """One computation over fixed addresses: its inputs and outputs stay in place."""

    def replay(self) -> None:
        """Computes it from the present inputs."""


Record = Callable[[Compute], Recorded]
"""Computes a step, and records it. Raises the step's error, or RecordingFailed."""


class RecordingFailed(RuntimeError):
    """The step is computed, and could not be recorded."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: they replay one at a time. The pool ends with
    the last of them, and the next one begins another. `wait` waits for what is computed; None: the
    stream does."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait or _synchronize
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self, compute: Compute) -> Recorded:
        # Once outside: compiles kernels, and lets libraries make their lasting allocations.
        compute()
        self._wait()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile: only this one's calls are recorded.
            with (
                _without_garbage_collection(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                compute()
        except RuntimeError as error:
            fault = find_fault(error)
            if fault is not None and fault.is_fatal:
                raise
            raise RecordingFailed(str(error)) from error
        self._graphs.add(graph)
        return graph


def _synchronize() -> None:
    torch.cuda.current_stream().synchronize()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keeps Python from deleting older recordings, or tensors, in cycles: to free memory of the
    device while a step is recorded ends the recording with an error."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RecordedSteps:
    """`compute(shape)` computes a step of this shape from fixed addresses.

    Decode steps are all recorded. There are many shapes of steps with prompts, of which most never
    occur, and each recording takes memory and as much time as a few steps. A shape that occurs is
    recorded when there is nothing else to do, or at the latest when it occurs for the LATEST_USE-th
    time: that step is late by as much, and waits for copies on other streams. If there are
    `max_prompts`, the least recently used makes room, once it is idle.

    Ranks that share a model do all of this at the same times, so that a step is replayed on all of
    them or on none. `agree(is_recorded)` returns whether a step is recorded on all.
    """

    def __init__(
        self,
        compute: Callable[[StepShape], None],
        record: Record,
        max_prompts: int,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._compute = compute
        self._record = record
        self._max_prompts = max_prompts
        self._agree = agree
        self._recorded: dict[StepShape, Recorded] = {}
        self._last_used: dict[StepShape, int] = {}
        """Numbers of steps, for all shapes of steps with prompts that have occurred."""
        self._wanted: dict[StepShape, int] = {}
        """Shapes that have occurred and are not recorded, and how often."""
        self._num_steps = 0

    def record_all(self, shapes: Sequence[StepShape], fill: Callable[[StepShape], None]) -> None:
        """Records these shapes, after `fill` of each, as far as there is room: the largest first,
        because all others, later ones too, then reuse its memory. The order of `shapes` does not
        matter: ranks record in the same one."""
        started_s = time.monotonic()
        num_prompts = 0
        for shape in sorted(shapes, key=_size, reverse=True):
            if shape.has_prompts:
                num_prompts += 1
                if num_prompts > self._max_prompts:
                    continue
                self._last_used[shape] = self._num_steps
            fill(shape)
            self.run(shape)
        seconds = time.monotonic() - started_s
        logger.info("recorded %d shapes of steps in %.1f s", len(shapes), seconds)

    def takes(self, shape: StepShape) -> bool:
        """Returns whether to pad a step to `shape` and to `run` it."""
        if not shape.has_prompts:
            return True
        self._num_steps += 1
        self._last_used[shape] = self._num_steps
        if shape in self._recorded:
            return True
        self._wanted[shape] = self._wanted.get(shape, 0) + 1
        return self._wanted[shape] >= LATEST_USE and self._make_room(shape)

    @property
    def shapes(self) -> frozenset[StepShape]:
        """The recorded ones."""
        return frozenset(self._recorded)

    @property
    def wants_any(self) -> bool:
        """Whether a shape has occurred without a recording, for `record_wanted`."""
        return bool(self._wanted)

    def record_wanted(self, fill: Callable[[StepShape], None]) -> bool:
        """Records, after `fill`, the shape that has occurred last without a recording. Returns
        whether there was any, and room for it."""
        if not self._wanted:
            return False
        shape = max(self._wanted, key=lambda shape: self._last_used[shape])
        if not self._make_room(shape):
            return False
        fill(shape)
        try:
            self.run(shape)
        except RuntimeError as error:
            if self._agree is not None or not is_out_of_memory(error):
                raise  # other ranks wait within the step
            self._record_no_more(shape, error)
        return shape in self._recorded

    def run(self, shape: StepShape) -> bool:
        """Computes a step of this shape. Returns whether it was replayed: if not, it is recorded
        now. Raises the error of a recording if every step of this shape needs it."""
        if shape in self._recorded:
            self._recorded[shape].replay()
            return True
        try:
            self._recorded[shape] = self._record_on_all(shape)
        except RecordingFailed as error:
            if not shape.has_prompts:
                raise (error.__cause__ or error) from None
            self._record_no_more(shape, error)
        self._wanted.pop(shape, None)
        return False

    def _record_on_all(self, shape: StepShape) -> Recorded:
        """Returns a recording, if all ranks have one. Raises as `Record`."""
        if self._agree is None:
            return self._record(lambda: self._compute(shape))
        recorded: Recorded | None = None
        failure = RecordingFailed("another rank could not record the step")
        failure.__cause__ = ExchangeFailed(str(failure))
        try:
            recorded = self._record(lambda: self._compute(shape))
        except RecordingFailed as error:
            failure = error
        if not self._agree(recorded is not None) or recorded is None:
            raise failure
        return recorded

    def _record_no_more(self, shape: StepShape, error: RuntimeError) -> None:
        """From now on a step with prompts is recorded only in the place of an idle recording."""
        logger.warning("a step could not be recorded: no more are", exc_info=error)
        self._wanted.pop(shape, None)
        self._max_prompts = sum(each.has_prompts for each in self._recorded)

    def _make_room(self, wanted: StepShape) -> bool:
        """Returns whether one more recording of a step with prompts has room now."""
        prompts = [shape for shape in self._recorded if shape.has_prompts]
        if len(prompts) < self._max_prompts:
            return True
        if not prompts:
            return False
        oldest = min(prompts, key=lambda shape: self._last_used[shape])
        is_idle = self._num_steps - self._last_used[oldest] >= IDLE_STEPS
        if not is_idle or self._last_used[wanted] < self._last_used[oldest]:
            return False
        del self._recorded[oldest]
        return True


def _size(shape: StepShape) -> tuple[int, int, int, bool]:
    return shape.num_tokens, shape.kind.value, shape.num_rows, shape.has_prompts
