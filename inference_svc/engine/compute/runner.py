"""Turns a batch into tokens: residency changes, the model, the sampler.

Decides nothing but in how many parts: where the device's memory does not suffice for a whole step.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference_svc.backends.base import Backend
from inference_svc.core import (
    Batch,
    BatchRow,
    Request,
    SampledToken,
    SamplingParams,
    Sequence,
)
from inference_svc.engine.compute.losses import Loss
from inference_svc.engine.compute.profiler import Marks
from inference_svc.engine.compute.routed_pages import RoutedPages
from inference_svc.engine.compute.sampler import Sampler
from inference_svc.engine.compute.scorer import choose, pool, score
from inference_svc.engine.policy.memory_backoff import Rows, StepLimit
from inference_svc.errors import CannotWake, EngineFailed
from inference_svc.grammars.masks import Masks
from inference_svc.host.device_faults import find_fault, is_out_of_memory
from inference_svc.model.checkpoint.classifier import ClassifierHead
from inference_svc.pictures.prompt import PictureWork
from inference_svc.results.base import PlacedPart
from kernels.sampling.reference import NOT_FINITE

logger = logging.getLogger(__name__)


class RunTimings(NamedTuple):
    """Seconds that each part of a batch took. On a device that computes in parallel with the host,
    `forward` launches and `sample` waits for the result; of several ranks `forward` waits, too.
    `pictures` are the device's seconds, which neither counts again. Work for pictures that fails
    takes `failed_pictures` instead, and rows may have done it again."""

    change_residency: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    pictures: float = 0.0
    failed_pictures: float = 0.0

    @property
    def of_rows(self) -> float:
        """The seconds that rows took."""
        return self.prepare + self.forward + self.sample

    def with_pictures(
        self, launched_s: float, computed_s: float, *, has_failed: bool
    ) -> RunTimings:
        """Returns these with pictures that took so long, of which the host launched for some time:
        for the rest rows have waited, in the longer one of `forward` and `sample`."""
        waited_s = max(computed_s - launched_s, 0.0)
        pictures_s = max(launched_s, computed_s)
        name = "forward" if self.forward > self.sample else "sample"
        timings = self._replace(**{name: max(getattr(self, name) - waited_s, 0.0)})
        if has_failed:
            return timings._replace(failed_pictures=pictures_s)
        return timings._replace(pictures=pictures_s)


class StepResult(NamedTuple):
    """`sampled` has a token for each row that samples, in their order, except for `lost` rows.
    `parts` are the results of a row that do not come with its token, in the order of its tokens.
    Rows of `late` sequences, whose masks were not there, are to be computed again."""

    sampled: list[SampledToken]
    timings: RunTimings
    lost: dict[Sequence, Loss]
    parts: dict[Sequence, list[PlacedPart]]
    late: frozenset[Sequence] = frozenset()

    def plus(self, other: StepResult) -> StepResult:
        timings = RunTimings(*map(sum, zip(self.timings, other.timings, strict=True)))
        parts = dict(self.parts)
        for sequence, found in other.parts.items():  # the rest of a row that was cut, perhaps
            parts[sequence] = parts.get(sequence, []) + found
        return StepResult(
            self.sampled + other.sampled,
            timings,
            self.lost | other.lost,
            parts,
            self.late | other.late,
        )


class Runner:
    """Owns nothing but references. `marks` name its work in a trace; `routed` is there if the model
    has experts, `base_head` if it classifies."""

    def __init__(
        self,
        backend: Backend[Any],
        sampler: Sampler,
        marks: Marks,
        limit: StepLimit,
        routed: RoutedPages | None = None,
        masks: Masks | None = None,
        base_head: ClassifierHead | None = None,
    ) -> None:
        self.backend = backend
        self.sampler = sampler
        self._marks = marks
        self._limit = limit
        self._masks = masks
        self._base_head = base_head
        self.routed = routed
        self._has_logged = False  # why rows of this step fail
        self._pools = False

    def restore(self) -> None:
        """Allocates the memory again that `free_memory` has freed; called in any thread, while
        nothing runs. Raises CannotWake with a remedy, and UnsupportedModel."""
        try:
            self.backend.restore()
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
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

        Where the memory does not suffice, or computing them fails, rows are computed in smaller
        parts, one after the other: they do not depend on each other. Parts that were computed
        before are written again. A row that cannot be computed alone is lost.
        """
        began_s = time.perf_counter()
        self._has_logged, self._pools = False, batch.pools
        with self._marks("change_residency"):
            self.backend.apply(batch.residency)
        applied_s = time.perf_counter()
        has_failed = False
        if batch.pictures.encodes or batch.pictures.dropped:
            with self._marks("pictures"):
                has_failed = not self._encode(batch.pictures)
        launched_s = time.perf_counter() - applied_s
        result = StepResult([], RunTimings(applied_s - began_s), {}, {})
        left, ran_out = batch.rows, False
        while left:
            part, rest = self._limit.cut(left)
            computed = self._compute(part)
            if computed is not None:
                result, left = result.plus(computed), rest
                if rest and rest[0].sequence is part[-1].sequence:
                    self.backend.keep_part(part[-1])
            else:
                is_least = part[0].num_tokens == 1 or self._limit.computes_whole
                if ran_out and is_least and len(part) == 1:
                    result.lost[part[0].sequence] = Loss.MEMORY
                self._reduce(part)
                ran_out = True
            if result.lost:  # nothing more of them, of which a part may be left
                left = tuple(row for row in left if row.sequence not in result.lost)
        if not ran_out:
            self._limit.succeeded()
        if batch.pictures.encodes:
            assert self.backend.pictures is not None
            computed_s = self.backend.pictures.seconds()
            timings = result.timings.with_pictures(launched_s, computed_s, has_failed=has_failed)
            result = result._replace(timings=timings)
        return result

    def _encode(self, work: PictureWork) -> bool:
        """Computes embeddings of pictures; returns False if that fails. A row whose embeddings
        cannot be computed now has them computed with itself, where it fails alone."""
        pictures = self.backend.pictures
        assert pictures is not None, "the model reads pictures"
        try:
            pictures.apply(work)
        except Exception as error:
            found = find_fault(error)
            if found is not None and found.is_fatal:
                raise
            logger.exception("pictures cannot be computed")
            return False
        return True

    def _keep_experts(self, rows: Rows, experts: Tensor) -> None:
        """Writes the experts that tokens have chosen next to their keys and values. The step has
        been waited for."""
        assert self.routed is not None, "the model has experts"
        # Of unsigned types torch computes with uint8 alone; numbers of experts are below 32,768.
        dtype = torch.uint8 if self.routed.shape.bytes_per_id == 1 else torch.int16
        self.routed.write(rows, experts.to(dtype).cpu().numpy())

    def _reduce(self, part: Rows) -> None:
        num_tokens = sum(row.num_tokens for row in part)
        self.backend.free_unused()
        self._limit.ran_out(num_tokens)
        logger.warning(
            "a step of %d tokens ran out of the device's memory: computing %d at once",
            num_tokens,
            self._limit.tokens,
        )

    def _compute(self, rows: Rows) -> StepResult | None:
        """Returns None if the memory does not suffice. Raises errors that no row has caused: the
        device, or this server, is broken."""
        try:
            return self._compute_all(rows)
        except EngineFailed:
            raise  # of several ranks, one has ended
        except Exception as error:
            found = find_fault(error)
            if found is not None and found.is_fatal:
                raise  # no row can be computed any more
            if found is not None:
                # The error holds the step's allocations, and is let go of here.
                return None
            if not self._has_logged:
                logger.exception("a step of %d rows fails", len(rows))
                self._has_logged = True
        return self._isolate(rows)

    def _isolate(self, rows: Rows) -> StepResult | None:
        """Computes a failing batch in halves, until a row that fails is alone and lost.

        Returns None if the memory does not suffice, for a row of the base model in its place
        either. Raises that row's error, because then it is not the rows."""
        for row in rows:
            row.sequence.token_counts = None  # half updated, perhaps
        if len(rows) == 1:
            try:
                self._compute_all((_plain_row(rows[0]),))
            except Exception as error:
                if is_out_of_memory(error):
                    return None
                raise
            return StepResult([], RunTimings(), {rows[0].sequence: Loss.FAULT}, {})
        middle = len(rows) // 2
        first, second = self._compute(rows[:middle]), self._compute(rows[middle:])
        return None if first is None or second is None else first.plus(second)

    def _compute_all(self, rows: Rows) -> StepResult:
        began_s = time.perf_counter()
        with self._marks("prepare"):
            inputs = self.backend.prepare(Batch(rows))
        prepared_s = time.perf_counter()
        with self._marks("forward"):
            logits, argmax, experts = self.backend.forward(inputs)
        computed_s = time.perf_counter()
        with self._marks("sample"):
            late = self._late(rows)
            choosing = [
                row.sequence if row.samples and row.sequence not in late else None for row in rows
            ]
            parts: dict[Sequence, list[PlacedPart]] = {}
            # Before the sampler changes logits.
            judged = list(choose(rows, logits)) if self._pools else []
            tokens = self.sampler.sample(logits, choosing, argmax)
            lost: dict[Sequence, Loss] = {}
            if experts is not None:
                self._keep_experts(rows, experts)
            for sequence, scores, is_sound in score(self.backend.score(inputs)):
                parts.setdefault(sequence, []).append(scores)
                if not is_sound:
                    lost[sequence] = Loss.NOT_FINITE
            hidden = self.backend.pool(inputs) if self._pools else ()
            for sequence, part, is_sound in (*judged, *pool(hidden, self._base_head)):
                parts.setdefault(sequence, []).append(part)
                if not is_sound:
                    lost[sequence] = Loss.NOT_FINITE
            if self.routed is not None:
                for sequence, routed in self.routed.read_new(rows):
                    parts.setdefault(sequence, []).append(routed)
        timings = RunTimings(
            0.0,
            prepared_s - began_s,
            computed_s - prepared_s,
            time.perf_counter() - computed_s,
        )
        for row, token in zip(rows, tokens, strict=True):
            if token.token_id == NOT_FINITE:
                lost[row.sequence] = Loss.NOT_FINITE
        sampled = [
            token
            for row, token in zip(rows, tokens, strict=True)
            if row.samples and row.sequence not in lost and row.sequence not in late
        ]
        return StepResult(sampled, timings, lost, parts, late)

    def _late(self, rows: Rows) -> frozenset[Sequence]:
        """Returns the sequences that choose a token and have no mask for it, after a moment."""
        masked = [row.sequence for row in rows if row.samples and row.sequence.masked is not None]
        if not masked:
            return frozenset()
        assert self._masks is not None
        late = self._masks.wait(sequence.masked for sequence in masked)
        return frozenset(sequence for sequence in masked if id(sequence.masked) in late)


def _plain_row(row: BatchRow) -> BatchRow:
    """Returns one of the base model in the place of the first token of a row, which is lost: where
    that fails, too, it is not the row that makes a step fail."""
    request = Request("", (0,) * (row.start + 1), SamplingParams(temperature=0.0))
    lost = row.sequence
    plain = Sequence(
        request,
        num_computed=row.start,
        page_ids=lost.page_ids,
        state_read=lost.state_read,
        state_written=lost.state_written,
    )
    return BatchRow(plain, row.start, 1, samples=True)
