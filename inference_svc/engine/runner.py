"""Turns a batch into tokens: residency changes, the model, the sampler. Decides nothing."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from inference_svc.backends.base import Backend
from inference_svc.core import Batch, SampledToken
from inference_svc.engine.profiler import Marks
from inference_svc.engine.sampler import Sampler


class RunTimings(NamedTuple):
    """Seconds that each part of a batch took. On a device that computes in parallel with the host,
    `forward` launches and `sample` waits for what was launched."""

    change_residency: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


class StepResult(NamedTuple):
    """`sampled` has a token for each row that samples, in their order."""

    sampled: list[SampledToken]
    timings: RunTimings


class Runner:
    """Owns nothing but references. `marks` name in a trace what it does."""

    def __init__(self, backend: Backend[Any], sampler: Sampler, marks: Marks) -> None:
        self.backend = backend
        self._arena = backend.arena
        self._sampler = sampler
        self._marks = marks

    def pop_completed_copies(self) -> list[str]:
        """Returns the adapters whose copies into the arena have completed since the last call."""
        return self._arena.pop_completed_copies()

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Applies the residency changes, computes every row, and samples for the rows that
        `samples`."""
        began_s = time.perf_counter()
        with self._marks("change_residency"):
            self._arena.apply(batch.residency)
        changed_s = time.perf_counter()
        if not batch.rows:
            return StepResult([], RunTimings(changed_s - began_s))
        with self._marks("prepare"):
            inputs = self.backend.prepare(batch)
        sampling = [row.sequence for row in batch.rows if row.samples]
        prepared_s = time.perf_counter()
        with self._marks("forward"):
            logits, argmax = self.backend.forward(inputs)
        computed_s = time.perf_counter()
        with self._marks("sample"):
            sampled = self._sampler.sample(logits, sampling, argmax)
        timings = RunTimings(
            changed_s - began_s,
            prepared_s - changed_s,
            computed_s - prepared_s,
            time.perf_counter() - computed_s,
        )
        return StepResult(sampled, timings)
