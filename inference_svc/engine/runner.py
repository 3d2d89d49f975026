"""Turns a batch into tokens: residency changes, the model, the sampler.

Decides nothing but in how many parts: where the device's memory does not suffice for a whole step.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference_svc.adapters.tiers import DivideMagnitudes
from inference_svc.backends.base import Backend
from inference_svc.backends.magnitudes import Divided, Magnitudes
from inference_svc.core import Batch, SampledToken, Sequence
from inference_svc.engine.profiler import Marks
from inference_svc.engine.routed_pages import RoutedPages
from inference_svc.engine.sampler import Sampler
from inference_svc.engine.scorer import SequenceScores, score
from inference_svc.engine.step_limit import Rows, StepLimit
from inference_svc.errors import CannotWake

logger = logging.getLogger(__name__)


class RunTimings(NamedTuple):
    """Seconds that each part of a batch took. On a device that computes in parallel with the host,
    `forward` launches and `sample` waits for what was launched."""

    change_residency: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


class StepResult(NamedTuple):
    """`sampled` has a token for each row that samples, in their order, but those of `failed`: the
    device's memory did not suffice for one of their tokens. `scores` are in the order of the rows
    and, of one, of its tokens."""

    sampled: list[SampledToken]
    timings: RunTimings
    failed: list[Sequence]
    scores: list[SequenceScores]

    def plus(self, part: StepResult) -> StepResult:
        timings = RunTimings(*map(sum, zip(self.timings, part.timings, strict=True)))
        scores = self.scores + part.scores
        return StepResult(self.sampled + part.sampled, timings, self.failed, scores)


class Runner:
    """Owns nothing but references. `marks` name in a trace what it does; `routed` is there if the
    model has experts."""

    def __init__(
        self,
        backend: Backend[Any],
        sampler: Sampler,
        marks: Marks,
        limit: StepLimit,
        routed: RoutedPages | None = None,
    ) -> None:
        self.backend = backend
        self._arena = backend.arena
        self._sampler = sampler
        self._marks = marks
        self._limit = limit
        self._routed = routed
        self._magnitudes: Magnitudes | None = None

    def pop_completed_copies(self) -> list[str]:
        """Returns the adapters whose copies into the arena have completed since the last call."""
        return self._arena.pop_completed_copies()

    def divide_magnitudes(self) -> list[Divided]:
        """Goes on with images whose magnitudes are being divided, as far as a step may wait;
        returns those that are done."""
        return [] if self._magnitudes is None else self._magnitudes.advance()

    def free_memory(self, *, weights: bool) -> int:
        """Frees the pages and, if asked, the weights; returns the bytes. No image is being
        divided."""
        if weights:
            self._magnitudes = None  # which reads them
        return self.backend.free_memory(weights=weights)

    def restore(self) -> None:
        """Makes what `free_memory` has freed; called in any thread, while nothing runs. Raises
        CannotWake saying what to do, and UnsupportedModel."""
        try:
            self.backend.restore()
        except (torch.OutOfMemoryError, MemoryError) as error:
            message = "others have taken the server's memory: free some, and wake it again"
            raise CannotWake(message) from error
        except OSError as error:
            raise CannotWake(
                f"the model cannot be read ({error.strerror}): restore its files, and wake the "
                "server again"
            ) from error

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Applies the residency changes, computes every row, and samples for the rows that
        `samples`.

        Where the memory does not suffice rows are computed in smaller parts, one after the other:
        they do not depend on each other. What of them was computed before is written again.
        """
        began_s = time.perf_counter()
        with self._marks("change_residency"):
            self._arena.apply(batch.residency)
            for change in batch.residency:
                if isinstance(change, DivideMagnitudes):
                    self._magnitudes = self._magnitudes or self.backend.magnitudes()
                    self._magnitudes.start(change.resident)
        result = StepResult([], RunTimings(time.perf_counter() - began_s), [], [])
        left, ran_out = batch.rows, False
        while left:
            part, rest = self._limit.cut(left)
            computed = self._compute(part)
            if computed is not None:
                result, left = result.plus(computed), rest
                continue
            if ran_out and part[0].num_tokens == len(part) == 1:
                lost = part[0].sequence
                result.failed.append(lost)
                left = tuple(row for row in rest if row.sequence is not lost)
            self._reduce(part)
            ran_out = True
        if not ran_out:
            self._limit.succeeded()
        return result

    def _keep_experts(self, rows: Rows, experts: Tensor) -> None:
        """Writes what tokens have chosen beside their keys and values. The step has been waited
        for."""
        assert self._routed is not None, "the model has experts"
        # Of unsigned types torch computes with uint8 alone; numbers of experts are below 32,768.
        dtype = torch.uint8 if self._routed.shape.bytes_per_id == 1 else torch.int16
        self._routed.write(rows, experts.to(dtype).cpu().numpy())

    def _reduce(self, part: Rows) -> None:
        num_tokens = sum(row.num_tokens for row in part)
        self.backend.free_unused()
        self._limit.ran_out(num_tokens)
        logger.warning(
            "the device's memory does not suffice for a step of %d tokens: %d at once",
            *(num_tokens, self._limit.tokens),
        )

    def _compute(self, rows: Rows) -> StepResult | None:
        """Returns None if the memory does not suffice."""
        try:
            return self._compute_all(rows)
        except torch.OutOfMemoryError:
            # The error holds what the step has allocated, and is let go of here.
            return None

    def _compute_all(self, rows: Rows) -> StepResult:
        began_s = time.perf_counter()
        with self._marks("prepare"):
            inputs = self.backend.prepare(Batch(rows))
        sampling = [row.sequence for row in rows if row.samples]
        prepared_s = time.perf_counter()
        with self._marks("forward"):
            logits, argmax, experts = self.backend.forward(inputs)
        computed_s = time.perf_counter()
        with self._marks("sample"):
            sampled = self._sampler.sample(logits, sampling, argmax)
            if experts is not None:
                self._keep_experts(rows, experts)
            scores = list(score(self.backend.score(inputs)))
        timings = RunTimings(
            0.0,
            prepared_s - began_s,
            computed_s - prepared_s,
            time.perf_counter() - computed_s,
        )
        return StepResult(sampled, timings, [], scores)
