"""One answer's spans, made when it is over from what the front and the engine know of it: the
engine itself does nothing for them while it computes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from inference_svc.core import FinishReason, Request
from inference_svc.engine.messages import Output, Timings
from inference_svc.text.prompt import ChatMessage, Prompt
from servicekit.telemetry import spans
from servicekit.telemetry.spans import CANCELLED, Attribute, OpenSpan

DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"


def begin_generation(request: Request, prompt: Prompt, model: str) -> GenerationTrace | None:
    """Below the current span. None: it is not traced."""
    parent = spans.current_sampled()
    if parent is None:
        return None
    is_chat = not isinstance(prompt, str) and any(isinstance(part, ChatMessage) for part in prompt)
    return GenerationTrace(parent, request, "chat" if is_chat else "text_completion", model)


class GenerationTrace:
    """A span after the GenAI conventions, and its phases:

    queue (adapter_wait), prefill, decode

    It is over when the caller has its answer or has left, and sent when the engine has had its last
    word about it, too, which of a caller that left comes a step later. Lives on the event loop.
    """

    def __init__(self, parent: OpenSpan, request: Request, operation: str, model: str) -> None:
        self.span = parent.child(f"{operation} {model}", start_s=request.arrival_s)
        self.span.attributes.update(_asked(request, operation, model))
        self._request = request
        self._last: Output | None = None
        self._is_asked = False
        self._is_heard = False
        self._end_s: float | None = None

    def submitted(self) -> None:
        """The engine is asked: `heard` follows."""
        self._is_asked = True

    def heard(self, last: Output | None) -> None:
        """The engine's last word. None: it will say nothing any more."""
        self._is_heard, self._last = True, last
        self._settle()

    def close(
        self,
        facts: Mapping[str, Attribute],
        num_sent: int,
        error: BaseException | None,
        *,
        left: bool,
    ) -> None:
        """The caller has had its answer, `num_sent` tokens, or has `left`."""
        self._end_s = time.monotonic()
        self.span.set_attributes(**facts)
        self.span.attributes["gen_ai.usage.output_tokens"] = num_sent
        deadline_s = self._request.deadline_s
        if deadline_s is not None and self._end_s >= deadline_s:
            self.span.error = DEADLINE_EXCEEDED
        elif left:
            self.span.attributes[CANCELLED] = True
        elif error is not None:
            self.span.fail(error)
        self._settle()

    def _settle(self) -> None:
        if self._end_s is None or (self._is_asked and not self._is_heard):
            return
        last = self._last
        if last is not None:
            self._tell(last)
        self.span.end(self._end_s)

    def _tell(self, last: Output) -> None:
        attributes = self.span.attributes
        num_tokens = 0
        if last.usage is not None:
            num_tokens = last.usage.completion_tokens
            attributes["loadout.cached_prompt_tokens"] = last.usage.cached_prompt_tokens
        if last.finish_reason is not None:
            # A stop string ends it here, in the front: the engine only hears that it is to stop.
            attributes.setdefault("gen_ai.response.finish_reasons", (last.finish_reason.value,))
        if last.timings is not None:
            self._tell_phases(last.timings, num_tokens)

    def finish(self, reason: FinishReason) -> None:
        """What the caller is told."""
        self.span.attributes["gen_ai.response.finish_reasons"] = (reason.value,)

    def _tell_phases(self, timings: Timings, num_tokens: int) -> None:
        """What has not happened is timed up to the engine's last word: see Timings."""
        began_s = self._request.arrival_s
        started_s, first_s = began_s + timings.queued_s, began_s + timings.first_token_s
        queue = self._phase("queue", began_s, started_s)
        if timings.adapter_wait_s > 0:
            wait = queue.child("adapter_wait", start_s=began_s)
            wait.link = timings.load
            wait.end(self._until(began_s + timings.adapter_wait_s))
        if first_s > started_s:
            self._phase("prefill", started_s, first_s)
        if num_tokens > 0 and self._end_s is not None and self._end_s > first_s:
            self._phase("decode", first_s, self._end_s)

    def _phase(self, name: str, start_s: float, end_s: float) -> OpenSpan:
        span = self.span.child(name, start_s=self._until(start_s))
        span.end(self._until(end_s))
        return span

    def _until(self, moment_s: float) -> float:
        """For whom it was done had left by then, maybe."""
        assert self._end_s is not None
        return min(moment_s, self._end_s)


def _asked(request: Request, operation: str, model: str) -> dict[str, Attribute]:
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
