"""One record per request: its caller, its adapter, its costs and how it ended.

When it closes it is counted in the metrics, logged as one line and shown in the trace. Tokens and
prompts are not in it, except for prompts with the setting `log_prompts`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from inference_svc.api.request_trace import GenerationTrace, begin_generation
from inference_svc.core import FinishReason, Principal, Request
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.errors import AdapterUnavailable
from inference_svc.frontend.output_stream import Delta
from inference_svc.metrics.requests import CANCELLED, Metrics, RequestEnd
from inference_svc.results.base import Kind
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.chat import Chat
from inference_svc.text.pair import Pair
from inference_svc.text.prompt import Prompt, Question, Text
from servicekit.errors import ServiceError
from servicekit.telemetry import spans

logger = logging.getLogger("inference_svc.requests")

MAX_ID_CHARS = 256
MAX_NAME_CHARS = 200
MAX_PROMPT_CHARS = 10_000


class PromptNote(NamedTuple):
    """A record's facts about a prompt; `text` is "" unless prompts are logged."""

    is_chat: bool = False
    text: str = ""


NO_PROMPT = PromptNote()


@dataclass(slots=True)
class RequestRecord:
    """The facts of one request so far. `adapter` is the caller's reference until `bind`; with
    `digest` it is the version of the last tokens, after `num_moves` to newer ones."""

    request_id: str = ""
    adapter: str = ""
    prompt: PromptNote = NO_PROMPT
    principal: str = ""
    tenant: str = ""
    digest: str = ""
    num_sent: int = 0
    start_s: float = field(default_factory=time.monotonic)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    trace: GenerationTrace | None = None
    is_adapter_inactive: bool = False
    num_moves: int = 0
    num_calls: int = 0
    num_invalid_calls: int = 0
    kind: Kind = Kind.GENERATE
    _binding: Binding | None = None
    _is_running: bool = False

    def authenticate(self, principal: Principal) -> None:
        self.principal, self.tenant = principal.name, principal.home_tenant

    def bind(self, binding: Binding | None) -> None:
        """Sets the adapter; None: the base model."""
        self._binding = binding
        if binding is not None:
            self.adapter, self.digest = binding.label, binding.digest

    def start(self, request: Request, model: str) -> GenerationTrace | None:
        """Called when the request is handed to the engine; returns its trace, if it is traced."""
        self.start_s, self._is_running = request.arrival_s, True
        self.is_adapter_inactive, self.kind = request.has_inactive_adapter, request.kind
        self.trace = begin_generation(request, model, is_chat=self.prompt.is_chat)
        return self.trace

    def add(self, delta: Delta) -> None:
        self.num_sent += len(delta.token_ids)
        self.num_calls += sum(bool(piece.name) for piece in delta.calls)
        self.num_invalid_calls += sum(bool(piece.error) for piece in delta.calls)
        if delta.version is not None and delta.version.digest != self.digest:
            self.adapter, self.digest = delta.version.label, delta.version.digest
            self.num_moves += 1
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.usage, self.timings = delta.usage, delta.timings
            if self.trace is not None:
                self.trace.finish(delta.finish_reason)

    def end(self, status: str, error: BaseException | None) -> RequestEnd | None:
        """Returns the counted facts; None if the engine never had the request."""
        if not self._is_running:
            return None
        return RequestEnd(
            outcome=self._outcome(status),
            adapters=self._names(),
            num_sent=self.num_sent,
            total_s=time.monotonic() - self.start_s,
            usage=self.usage,
            timings=self.timings,
            gave_up=isinstance(error, AdapterUnavailable),
            num_calls=self.num_calls,
            num_invalid_calls=self.num_invalid_calls,
            kind=self.kind,
        )

    def _names(self) -> tuple[str, ...]:
        """Returns the names of the adapters, without versions."""
        binding = self._binding
        if binding is None:
            return ()
        return tuple(dict.fromkeys(label.partition("@")[0] for label in binding.names))

    def _outcome(self, status: str) -> str:
        if self.finish_reason is not None:  # whether or not the last delta could be sent
            return self.finish_reason.value
        return CANCELLED if status == "CANCELLED" else "error"

    def subject(self) -> dict[str, str]:
        """Returns the fields that identify it in log and traces."""
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "adapter": self.adapter[:MAX_NAME_CHARS],
            "digest": self.digest,
        }

    def facts(self) -> dict[str, object]:
        """Returns the fields of its log line."""
        facts: dict[str, object] = {
            **self.subject(),
            "who": self.principal,
            "completion_tokens": self.num_sent,
            "total_s": round(time.monotonic() - self.start_s, 6),
        }
        if self.kind is not Kind.GENERATE:
            facts["kind"] = self.kind.value
        if self.is_adapter_inactive:
            facts["adapter_inactive"] = True
        if self.num_calls:
            facts["tool_calls"] = self.num_calls
        if self.num_moves:
            facts["adapter_moves"] = self.num_moves
        if self.finish_reason is not None:
            facts["finish_reason"] = self.finish_reason.value
        if self.usage is not None:
            facts["prompt_tokens"] = self.usage.prompt_tokens
            facts["cached_prompt_tokens"] = self.usage.cached_prompt_tokens
        if self.timings is not None:
            facts["queued_s"] = round(self.timings.queued_s, 6)
            facts["adapter_wait_s"] = round(self.timings.adapter_wait_s, 6)
            facts["first_token_s"] = round(self.timings.first_token_s, 6)
        return facts


class RequestLog:
    """Opens and closes records, on the event loop. `code_of` names the status that an error is
    answered with."""

    def __init__(
        self, metrics: Metrics, code_of: Callable[[BaseException], str], *, log_prompts: bool
    ) -> None:
        self._metrics = metrics
        self._code_of = code_of
        self._log_prompts = log_prompts

    def note_of(self, prompt: Prompt) -> PromptNote:
        return PromptNote(
            isinstance(prompt, Chat | Question), _prompt_text(prompt) if self._log_prompts else ""
        )

    @contextmanager
    def record_if_failed(self, request_id: str, adapter: str) -> Iterator[RequestRecord]:
        """Opens the record of a call that is being prepared. It closes only if the context raises;
        else each request of the call continues it with `fork`."""
        record = RequestRecord(request_id[:MAX_ID_CHARS], adapter)
        try:
            yield record
        except BaseException as error:
            self._close(record, error)
            raise

    @contextmanager
    def fork(self, record: RequestRecord, request_id: str) -> Iterator[RequestRecord]:
        """Opens a copy of `record` for one request; it closes with the context."""
        own = replace(record, request_id=request_id[:MAX_ID_CHARS])
        error: BaseException | None = None
        try:
            yield own
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._close(own, error)

    def _close(self, record: RequestRecord, error: BaseException | None) -> None:
        status = "OK" if error is None else self._code_of(error)
        end = record.end(status, error)
        if end is not None:
            self._metrics.count_request(end)
        _close_trace(record, status, error)
        if not logger.isEnabledFor(logging.INFO):
            return
        facts = record.facts() | {"status": status}
        if isinstance(error, ServiceError):
            facts["reason"] = error.reason
        if self._log_prompts:
            facts["prompt"] = record.prompt.text
        logger.info("request finished", extra=facts)


def _close_trace(record: RequestRecord, status: str, error: BaseException | None) -> None:
    span, is_cancelled = spans.current_sampled(), status == "CANCELLED"
    if span is not None:
        span.set_attributes(**record.subject())
        if is_cancelled:
            span.attributes[spans.CANCELLED] = True
    if record.trace is not None:
        record.trace.close(record.subject(), record.num_sent, error, is_cancelled=is_cancelled)


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, Question):
        prompt = prompt.chat
    if isinstance(prompt, Text):
        lines = [prompt.text]
    elif isinstance(prompt, Pair):
        lines = [prompt.first, prompt.second]
    elif isinstance(prompt, Chat):
        lines = [f"{each.role}: {each.content}" for each in prompt.messages[:MAX_PROMPT_CHARS]]
    else:
        lines = list(map(str, prompt[:MAX_PROMPT_CHARS]))
    return "\n".join(lines)[:MAX_PROMPT_CHARS]
