"""One account per request: who asked for what, what it took and how it ended.

When it closes it is counted in the metrics and logged as one line. Tokens and prompts are not in
it, unless a setting asks for prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from inference_svc.access import Principal
from inference_svc.api.request_trace import GenerationTrace
from inference_svc.core import FinishReason, Request
from inference_svc.engine.messages import Timings, Usage
from inference_svc.errors import AdapterUnavailable
from inference_svc.frontend.output_stream import Delta
from inference_svc.metrics.metrics import CANCELLED, Metrics, RequestEnd
from inference_svc.store.directory import Binding
from inference_svc.text.prompt import ChatMessage, Prompt
from servicekit.errors import ServiceError
from servicekit.telemetry import spans

log = logging.getLogger("inference_svc.requests")

MAX_ID_CHARS = 256
MAX_NAME_CHARS = 200
MAX_PROMPT_CHARS = 10_000


@dataclass(slots=True)
class Account:
    """What is known of one request so far. `adapter` is as it was asked for until it is bound."""

    request_id: str = ""
    adapter: str = ""
    prompt: Prompt = ""
    who: str = ""
    tenant: str = ""
    digest: str = ""
    num_sent: int = 0
    began_s: float = field(default_factory=time.monotonic)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    trace: GenerationTrace | None = None
    _binding: Binding | None = None
    _is_running: bool = False

    def admit(self, who: Principal) -> None:
        """It is known who asks."""
        self.who, self.tenant = who.name, who.home_tenant

    def bind(self, binding: Binding | None) -> None:
        """The adapter is known; None: the base model."""
        self._binding = binding
        if binding is not None:
            self.adapter, self.digest = binding.label, binding.digest

    def start(self, request: Request) -> None:
        """The engine is asked."""
        self.began_s, self._is_running = request.arrival_s, True

    def note(self, delta: Delta) -> None:
        """Tokens are handed on, the last ones with how it ended."""
        self.num_sent += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.usage, self.timings = delta.usage, delta.timings
            if self.trace is not None:
                self.trace.finish(delta.finish_reason)

    def end(self, status: str, error: BaseException | None) -> RequestEnd | None:
        """How it ended, if the engine was asked."""
        if not self._is_running:
            return None
        label = "" if self._binding is None else self._binding.label
        return RequestEnd(
            outcome=self._outcome(status),
            adapter=label.partition("@")[0],
            num_sent=self.num_sent,
            total_s=time.monotonic() - self.began_s,
            usage=self.usage,
            timings=self.timings,
            gave_up=isinstance(error, AdapterUnavailable),
        )

    def _outcome(self, status: str) -> str:
        if self.finish_reason is not None:  # whether or not the last of it could be sent
            return self.finish_reason.value
        return CANCELLED if status == "CANCELLED" else "error"

    def subject(self) -> dict[str, str]:
        """What it is about, for log and traces."""
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "adapter": self.adapter[:MAX_NAME_CHARS],
            "digest": self.digest,
        }

    def facts(self) -> dict[str, object]:
        """For the log."""
        facts: dict[str, object] = {
            **self.subject(),
            "who": self.who,
            "completion_tokens": self.num_sent,
            "total_s": round(time.monotonic() - self.began_s, 6),
        }
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


class Accounts:
    """Lives on the event loop. `code_of` names the status that an error is answered with."""

    def __init__(
        self, metrics: Metrics, code_of: Callable[[BaseException], str], *, log_prompts: bool
    ) -> None:
        self._metrics = metrics
        self._code_of = code_of
        self._log_prompts = log_prompts

    @contextmanager
    def open(self, request_id: str, adapter: str) -> Iterator[Account]:
        """The account of a request that lasts as long as the context."""
        with self._closing(Account(request_id[:MAX_ID_CHARS], adapter)) as account:
            yield account

    @contextmanager
    def asking(self, request_id: str, adapter: str) -> Iterator[Account]:
        """As `open`, for who may ask for several answers at once: it closes only if the context
        raises. Else each answer has an account of its own, a `further` one."""
        account = Account(request_id[:MAX_ID_CHARS], adapter)
        try:
            yield account
        except BaseException as error:
            self._close(account, error)
            raise

    @contextmanager
    def further(self, account: Account, request_id: str) -> Iterator[Account]:
        """One that begins as `account` is, and lasts as long as the context."""
        with self._closing(replace(account, request_id=request_id[:MAX_ID_CHARS])) as own:
            yield own

    @contextmanager
    def _closing(self, account: Account) -> Iterator[Account]:
        error: BaseException | None = None
        try:
            yield account
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._close(account, error)

    def _close(self, account: Account, error: BaseException | None) -> None:
        status = "OK" if error is None else self._code_of(error)
        end = account.end(status, error)
        if end is not None:
            self._metrics.count_request(end)
        _show(account, status, error)
        if not log.isEnabledFor(logging.INFO):
            return
        facts = account.facts() | {"status": status}
        if isinstance(error, ServiceError):
            facts["reason"] = error.reason
        if self._log_prompts:
            facts["prompt"] = _shown(account.prompt)
        log.info("request finished", extra=facts)


def _show(account: Account, status: str, error: BaseException | None) -> None:
    """In the trace, if there is one."""
    span, has_left = spans.current_sampled(), status == "CANCELLED"
    if span is not None:
        span.set_attributes(**account.subject())
        if has_left:
            span.attributes[spans.CANCELLED] = True
    if account.trace is not None:
        account.trace.close(account.subject(), account.num_sent, error, left=has_left)


def _shown(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        parts = prompt[:MAX_PROMPT_CHARS]
        prompt = "\n".join(
            f"{part.role}: {part.content}" if isinstance(part, ChatMessage) else str(part)
            for part in parts
        )
    return prompt[:MAX_PROMPT_CHARS]
