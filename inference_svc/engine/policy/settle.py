"""Accounts for a step: the only place that appends tokens, settles state and ends sequences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from inference_svc.core import Batch, FinishReason, SampledToken, Sequence
from inference_svc.engine.policy.scheduler import Scheduler
from inference_svc.engine.transport.messages import Output, Timings, Usage
from inference_svc.grammars.masks import Masks
from inference_svc.results.base import PlacedPart, ResultPart
from servicekit.telemetry.histogram import Histogram

NO_PARTS: Mapping[Sequence, list[PlacedPart]] = {}


@dataclass(slots=True)
class Settler:
    """`eos_token_ids` of the model; no sequence grows beyond `max_model_len` tokens.

    `token_gaps` are the times between a sequence's tokens; `num_sampled` counts all tokens.
    """

    scheduler: Scheduler
    eos_token_ids: Collection[int]
    max_model_len: int
    masks: Masks | None = None
    token_gaps: Histogram = field(default_factory=Histogram)
    num_sampled: int = 0
    _settled_s: float = -math.inf

    def settle(
        self,
        batch: Batch,
        sampled: list[SampledToken],
        now_s: float,
        parts: Mapping[Sequence, list[PlacedPart]] = NO_PARTS,
    ) -> list[Output]:
        """Returns one output per row that sampled or has `parts`. `sampled` is in the order of the
        rows that sampled, and has the parts of their tokens."""
        tokens = iter(sampled)
        outputs = []
        states = self.scheduler.states
        before_s, self._settled_s, num_steady, num_sampled = self._settled_s, now_s, 0, 0
        for sequence, start, num_tokens, samples in batch.rows:
            end = sequence.num_computed = sequence.num_computed + num_tokens
            if end >= sequence.settles_at:
                states.settle(sequence, start)
            found: tuple[PlacedPart, ...] = ()
            if parts and sequence in parts:
                found = tuple(parts[sequence])
                for part in found:
                    sequence.note_returned(part)
            if samples:
                if sequence.last_token_s == before_s:
                    num_steady += 1
                elif sequence.last_token_s is not None:
                    self.token_gaps.observe(now_s - sequence.last_token_s)
                outputs.append(self._append(sequence, next(tokens), found, now_s))
                num_sampled += bool(outputs[-1].token_ids)
            elif found:
                outputs.append(self._return(sequence, found, now_s))
        if self.masks is not None:
            self.masks.flush()
        if num_steady:  # most of them: their last token came with the step before
            self.token_gaps.observe(now_s - before_s, num_steady)
        self.num_sampled += num_sampled
        return outputs

    def end(
        self,
        sequence: Sequence,
        now_s: float,
        *,
        reason: FinishReason | None = None,
        error: Exception | None = None,
        expired: bool = False,
    ) -> Output:
        """Ends a sequence, waiting or running, and frees all that it holds."""
        self.scheduler.remove(sequence, expired=expired)
        return Output(
            sequence.request.request_id,
            finish_reason=reason,
            error=error,
            usage=_usage(sequence),
            timings=_timings(sequence, now_s),
            version=sequence.version,
        )

    def _return(self, sequence: Sequence, found: tuple[PlacedPart, ...], now_s: float) -> Output:
        """Returns the parts of a row that does not sample; with the last ones of a prompt that is
        pooled the sequence ends."""
        if sequence.end_pooled and sequence.next_pooled == sequence.end_pooled:
            return self.end(sequence, now_s, reason=FinishReason.STOP)._replace(parts=found)
        request_id = sequence.request.request_id
        return Output(request_id, parts=found, version=sequence.version)

    def _append(
        self,
        sequence: Sequence,
        token: SampledToken,
        found: tuple[PlacedPart, ...],
        now_s: float,
    ) -> Output:
        if not sequence.num_output:
            self.scheduler.siblings.computed(sequence)
        if not sequence.request.sampling.max_tokens:  # its prompt is all that it was to compute
            return self.end(sequence, now_s, reason=FinishReason.LENGTH)._replace(parts=found)
        sequence.token_ids.append(token.token_id)
        sequence.has_sampled = True
        if sequence.thinking is not None:
            sequence.thinking.accept(token.token_id)
        if sequence.is_sorted:
            self.scheduler.queue.sorted_for(sequence)
        sequence.last_token_s = now_s
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        reason = self._finish_reason(sequence, token.token_id)
        parts: tuple[ResultPart, ...] = token.parts
        if found:
            parts += found
        request_id = sequence.request.request_id
        if reason is None:
            if sequence.masked is not None:
                assert self.masks is not None
                self.masks.accept(sequence.masked, token.token_id)
            return Output(request_id, (token.token_id,), parts, version=sequence.version)
        self.scheduler.remove(sequence)
        return Output(
            request_id,
            (token.token_id,),
            parts,
            finish_reason=reason,
            usage=_usage(sequence),
            timings=_timings(sequence, now_s),
            version=sequence.version,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        num_tokens = len(sequence.token_ids)
        num_output = num_tokens - sequence.num_prompt
        if num_output >= sampling.min_tokens:
            ends = not sampling.ignore_eos and token_id in self.eos_token_ids
            if ends or token_id in sampling.stop_token_ids:
                return FinishReason.STOP
        full = num_tokens >= self.max_model_len or num_output >= sampling.max_tokens
        return FinishReason.LENGTH if full else None


def _usage(sequence: Sequence) -> Usage:
    return Usage(sequence.num_prompt, sequence.num_cached, sequence.num_output)


def _timings(sequence: Sequence, now_s: float) -> Timings:
    """Counts phases that have not ended up to now."""
    arrival = sequence.request.arrival_s
    since = sequence.adapter_wanted_s
    ready = now_s if sequence.adapter_ready_s is None else sequence.adapter_ready_s
    return Timings(
        queued_s=(now_s if sequence.started_s is None else sequence.started_s) - arrival,
        adapter_wait_s=0.0 if since is None else max(0.0, ready - since),
        first_token_s=(now_s if sequence.first_token_s is None else sequence.first_token_s)
        - arrival,
        load=sequence.load_trace,
    )
