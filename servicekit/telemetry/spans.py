"""Spans as plain data, and the current span of a task or thread. `tracing` sends them.

Nothing here imports OpenTelemetry: untraced work costs one read of a context variable, and code
that only computes can make, pickle and pass on spans.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from servicekit.telemetry.redact import redact

Kind: TypeAlias = Literal["internal", "server", "client"]
Attribute: TypeAlias = str | bool | int | float | tuple[str, ...]
Headers: TypeAlias = Iterable[tuple[str, str | bytes]]

PARENT_HEADER = "traceparent"
STATE_HEADER = "tracestate"
MAX_STATE_CHARS = 512
MAX_TEXT_CHARS = 256
"""Attributes that callers choose are cut to this length."""

CANCELLED = "loadout.cancelled"
"""Marks work whose caller left before its end, which is no error."""

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_dice = random.SystemRandom()


def new_id(num_bytes: int) -> str:
    """Returns a random id as hex digits, never all 0."""
    return f"{_dice.randrange(1, 1 << 8 * num_bytes):0{2 * num_bytes}x}"


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Names a span of a trace, as W3C's Trace Context does. `is_random`: the trace's id is random,
    which some samplers need."""

    trace_id: str
    span_id: str
    is_sampled: bool = True
    state: str = ""
    is_random: bool = True

    @property
    def flags(self) -> int:
        return int(self.is_sampled) | int(self.is_random) << 1

    def child(self) -> SpanContext:
        """Returns the context of a new span in the same trace."""
        return replace(self, span_id=new_id(8))

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Returns the headers that make this span the parent of another service's."""
        parent = f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"
        state = ((STATE_HEADER, self.state),) if self.state else ()
        return ((PARENT_HEADER, parent), *state)


def caller_of(headers: Headers) -> SpanContext | None:
    """Returns the span that a caller names; None if there is none or it is malformed."""
    found = {key: value for key, value in headers if key in (PARENT_HEADER, STATE_HEADER)}
    parent, state = found.get(PARENT_HEADER, ""), found.get(STATE_HEADER, "")
    match = _PARENT.fullmatch(parent) if isinstance(parent, str) else None
    if match is None or not (int(match[1], 16) and int(match[2], 16)):
        return None
    keeps_state = isinstance(state, str) and state.isprintable() and len(state) <= MAX_STATE_CHARS
    flags = int(match[3], 16)
    return SpanContext(
        match[1], match[2], bool(flags & 1), str(state) if keeps_state else "", bool(flags & 2)
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Describes finished work; can be pickled. Times are `time.monotonic()` seconds, which all
    processes of a machine share. `parent_id` is "" for a trace's first span, `error` "" on success;
    `link` is another span that the work waited for."""

    name: str
    kind: Kind
    context: SpanContext
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""
    link: SpanContext | None = None


@dataclass(eq=False, slots=True)
class OpenSpan:
    """Describes work in progress. `record` is called, in any thread, when it or a child ends."""

    name: str
    kind: Kind
    context: SpanContext
    parent_id: str
    record: Callable[[Span], None]
    start_s: float = field(default_factory=time.monotonic)
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""
    link: SpanContext | None = None
    has_ended: bool = False

    def child(
        self,
        name: str,
        kind: Kind = "internal",
        start_s: float | None = None,
        **attributes: Attribute,
    ) -> OpenSpan:
        """Opens a span below this one, which began at `start_s` or begins now."""
        start_s = time.monotonic() if start_s is None else start_s
        context = self.context.child()
        return OpenSpan(name, kind, context, self.context.span_id, self.record, start_s, attributes)

    def set_attributes(self, **attributes: Attribute) -> None:
        """Sets attributes under our prefix. Strings are cut and redacted, empty ones left out."""
        for key, value in attributes.items():
            if value != "":
                value = redact(value[:MAX_TEXT_CHARS]) if isinstance(value, str) else value
                self.attributes[f"loadout.{key}"] = value

    def fail(self, error: BaseException) -> None:
        """Records the error's `reason`, or its type: its text could contain anything."""
        if isinstance(error, Exception):
            self.error = getattr(error, "reason", "") or type(error).__name__
        else:  # cancelled, or closed
            self.attributes[CANCELLED] = True

    def end(self, end_s: float | None = None) -> None:
        """Ends the span at `end_s` or now. A second call does nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        if self.context.is_sampled:
            end_s = max(self.start_s, time.monotonic() if end_s is None else end_s)
            self.record(
                Span(
                    self.name,
                    self.kind,
                    self.context,
                    self.parent_id,
                    self.start_s,
                    end_s,
                    self.attributes,
                    self.error,
                    self.link,
                )
            )


# --- the current span of this task or thread -----------------------------------------------------

_CURRENT: ContextVar[OpenSpan | None] = ContextVar("current_span", default=None)


def current() -> OpenSpan | None:
    """Returns the current span; None if nothing here is traced."""
    return _CURRENT.get()


def current_sampled() -> OpenSpan | None:
    """Returns the current span if it will be sent."""
    span = _CURRENT.get()
    return span if span is not None and span.context.is_sampled else None


def set_current(span: OpenSpan | None) -> None:
    """Makes the span current for the rest of this task, and in the tasks that it starts."""
    _CURRENT.set(span)


@contextmanager
def use_span(span: OpenSpan | None) -> Iterator[None]:
    """Makes the span current inside the context."""
    token = _CURRENT.set(span)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def child_span(name: str, **attributes: Attribute) -> Iterator[OpenSpan | None]:
    """Opens a child of the current span, current inside the context; None if nothing is traced."""
    parent = current_sampled()
    if parent is None:
        yield None
        return
    span = parent.child(name)
    span.set_attributes(**attributes)
    try:
        with use_span(span):
            yield span
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        span.end()


def outgoing_headers() -> tuple[tuple[str, str], ...]:
    """Returns the headers for requests to another service on behalf of the current span."""
    span = _CURRENT.get()
    return () if span is None else span.context.headers()


def log_fields() -> dict[str, str]:
    """Returns the fields by which log lines name the current span."""
    span = current_sampled()
    if span is None:
        return {}
    return {"trace_id": span.context.trace_id, "span_id": span.context.span_id}


class Phases:
    """Opens children of the current span one after the other, for generators: no child is made
    current, because the generator's consumer runs in the same context between two items."""

    def __init__(self) -> None:
        self._parent = current_sampled()
        self._open: OpenSpan | None = None

    def enter(self, name: str) -> None:
        """Ends the phase before and opens this one."""
        if self._parent is not None:
            self.end()
            self._open = self._parent.child(name)

    def end(self, error: BaseException | None = None, **attributes: Attribute) -> None:
        if self._open is not None:
            self._open.set_attributes(**attributes)
            if error is not None:
                self._open.fail(error)
            self._open.end()
            self._open = None
