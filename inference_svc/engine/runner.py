"""Turns a batch into tokens: residency changes, the model, the sampler. Decides nothing."""

from __future__ import annotations

import time

import torch

from inference_svc.adapters.arena import Arena
from inference_svc.backends.base import StepModel
from inference_svc.core import Batch, SampledToken
from inference_svc.engine.profiler import Marks
from inference_svc.engine.sampler import Sampler


class Runner:
    """Owns nothing but references. `marks` name in a trace what it does."""

    def __init__(self, model: StepModel, arena: Arena, sampler: Sampler, marks: Marks) -> None:
        self.model = model
        self._arena = arena
        self._sampler = sampler
        self._marks = marks
        self.changes_s = 0.0
        """What the residency changes of the last batch cost."""
        self.prepare_s = self.forward_s = self.sample_s = 0.0
        """How long the last batch was described, computed, and its tokens were chosen: on a device
        that computes beside us, launched, and then waited for."""

    @property
    def compute_s(self) -> float:
        """How long the model computed the last batch, with choosing its tokens."""
        return self.forward_s + self.sample_s

    def pop_completed_copies(self) -> list[str]:
        """The adapters whose copies into the arena have completed since the last call."""
        return self._arena.pop_completed_copies()

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[SampledToken]:
        """Applies the residency changes, computes every row, and samples for the rows that
        `samples`, in their order."""
        began_s = time.perf_counter()
        with self._marks("change_residency"):
            self._arena.apply(batch.residency)
        self.changes_s = time.perf_counter() - began_s
        if not batch.rows:
            return []
        began_s = time.perf_counter()
        with self._marks("prepare"):
            self.model.prepare(batch)
        sampling = [row.sequence for row in batch.rows if row.samples]
        prepared_s = time.perf_counter()
        with self._marks("forward"):
            logits = self.model.forward()
        computed_s = time.perf_counter()
        with self._marks("sample"):
            sampled = self._sampler.sample(logits, sampling)
        self.prepare_s, self.forward_s = prepared_s - began_s, computed_s - prepared_s
        self.sample_s = time.perf_counter() - computed_s
        return sampled
