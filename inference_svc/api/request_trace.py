"""The spans of one request, made when it is over from the frontend's and the engine's times: the
engine does nothing for them while it computes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from inference_svc.core import FinishReason, Request
from inference_svc.engine.transport.messages import Output, Timings
from inference_svc.results.base import Kind
from servicekit.telemetry import spans
from servicekit.telemetry.spans import CANCELLED, Attribute, OpenSpan
from servicekit.telemetry.tracing import DEADLINE_SLACK_S

_OPERATIONS = {Kind.EMBED: "embeddings", Kind.SCORE: "score", Kind.CLASSIFY: "classify"}
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"


def begin_generation(request: Request, model: str, *, is_chat: bool) -> GenerationTrace | None:
    """Returns a trace below the current span; None if that is not sampled."""
    parent = spans.current_sampled()
    if parent is None:
        return None
    operation = "chat" if is_chat else "text_completion"
    operation = _OPERATIONS.get(request.kind, operation)
    return GenerationTrace(parent, request, operation, model)


class GenerationTrace:
    """A span after the GenAI conventions, and its phases:

    queue (adapter_wait), prefill, decode

    It ends when the caller has its answer or has left, and is sent once the engine has finished
    the request, too, which is a step later when the caller has left. Lives on the event loop.
    """

    def __init__(self, parent: OpenSpan, request: Request, operation: str, model: str) -> None:
        self.span = parent.child(f"{operation} {model}", start_s=request.arrival_s)
        self.span.attributes.update(_request_attributes(request, operation, model))
        self._request = request
        self._last: Output | None = None
        self._is_submitted = False
        self._is_finished = False
        self._end_s: float | None = None

    def submitted(self) -> None:
        self._is_submitted = True

    def finished(self, last: Output | None) -> None:
        self._is_finished, self._last = True, last
        self._end_if_complete()

    def close(
        self,
        facts: Mapping[str, Attribute],
        num_sent: int,
        error: BaseException | None,
        *,
        is_cancelled: bool,
    ) -> None:
        """Called when the caller has had its answer, `num_sent` tokens, or has cancelled it."""
        self._end_s = time.monotonic()
        self.span.set_attributes(**facts)
        self.span.attributes["gen_ai.usage.output_tokens"] = num_sent
        deadline_s, slack_s = self._request.deadline_s, DEADLINE_SLACK_S * is_cancelled
        if deadline_s is not None and self._end_s >= deadline_s - slack_s:
            self.span.error = DEADLINE_EXCEEDED
        elif is_cancelled:
            self.span.attributes[CANCELLED] = True
        elif error is not None:
            self.span.fail(error)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._end_s is None or (self._is_submitted and not self._is_finished):
            return
        last = self._last
        if last is not None:
            self._add_output(last)
        self.span.end(self._end_s)

    def _add_output(self, last: Output) -> None:
        attributes = self.span.attributes
        num_tokens = 0
        if last.usage is not None:
            num_tokens = last.usage.completion_tokens
            attributes["loadout.cached_prompt_tokens"] = last.usage.cached_prompt_tokens
        if last.finish_reason is not None:
            # A stop string is found in the frontend: to the engine it is a cancellation.
            attributes.setdefault("gen_ai.response.finish_reasons", (last.finish_reason.value,))
        if last.timings is not None:
            self._add_phases(last.timings, num_tokens)

    def finish(self, reason: FinishReason) -> None:
        """Sets the reason that the caller gets."""
        self.span.attributes["gen_ai.response.finish_reasons"] = (reason.value,)

    def _add_phases(self, timings: Timings, num_tokens: int) -> None:
        """Phases that were not reached have the time up to the last output: see Timings."""
        arrival_s = self._request.arrival_s
        started_s, first_s = arrival_s + timings.queued_s, arrival_s + timings.first_token_s
        queue = self._phase("queue", arrival_s, started_s)
        if timings.adapter_wait_s > 0:
            wait = queue.child("adapter_wait", start_s=arrival_s)
            wait.link = timings.load
            wait.end(self._clipped(arrival_s + timings.adapter_wait_s))
        if first_s > started_s:
            self._phase("prefill", started_s, first_s)
        if num_tokens > 0 and self._end_s is not None and self._end_s > first_s:
            self._phase("decode", first_s, self._end_s)

    def _phase(self, name: str, start_s: float, end_s: float) -> OpenSpan:
        span = self.span.child(name, start_s=self._clipped(start_s))
        span.end(self._clipped(end_s))
        return span

    def _clipped(self, moment_s: float) -> float:
        """Returns a time no later than the end: the caller may have left before."""
        assert self._end_s is not None
        return min(moment_s, self._end_s)


def _request_attributes(request: Request, operation: str, model: str) -> dict[str, Attribute]:
    sampling = request.sampling
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "loadout",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
    }
