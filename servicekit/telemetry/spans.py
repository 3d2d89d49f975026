"""What a trace shows, as plain data: who does a piece of work says what it was; `tracing` sends it.

Nothing here knows OpenTelemetry, so that what is not traced costs a look at a context variable, and
spans can be made, pickled and handed on by parts that only compute.
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
"""Of an attribute that a caller made up."""

CANCELLED = "loadout.cancelled"
"""Attribute of what somebody left before it had ended: that is no error."""

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_dice = random.SystemRandom()


def new_id(num_bytes: int) -> str:
    """A random one as hex digits, not all of them 0."""
    return f"{_dice.randrange(1, 1 << 8 * num_bytes):0{2 * num_bytes}x}"


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Which span of which trace, as W3C's Trace Context has it. `is_random`: the trace's id is a
    random one, as samplers may want it."""

    trace_id: str
    span_id: str
    is_sampled: bool = True
    state: str = ""
    is_random: bool = True

    @property
    def flags(self) -> int:
        return int(self.is_sampled) | int(self.is_random) << 1

    def child(self) -> SpanContext:
        """Of a new span in the same trace."""
        return replace(self, span_id=new_id(8))

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What tells another service that it works for this span."""
        parent = f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"
        state = ((STATE_HEADER, self.state),) if self.state else ()
        return ((PARENT_HEADER, parent), *state)


def caller_of(headers: Headers) -> SpanContext | None:
    """The span that a caller names. None: it names none, or not as it should."""
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
    """A piece of work that is over; pickles. Times are `time.monotonic()` seconds, which processes
    of one machine share. `parent_id` is "" for the first of a trace, `error` "" for what went well;
    `link` is another piece of work that it had to wait for."""

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
    """Work in progress. `record` hears of it, and of all below it, when it is over; it may be
    called in any thread."""

    name: str
    kind: Kind
    context: SpanContext
    parent_id: str
    record: Callable[[Span], None]
    start_s: float = field(default_factory=time.monotonic)
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""
    link: SpanContext | None = None
    is_over: bool = False

    def child(
        self, name: str, kind: Kind = "internal", start_s: float | None = None, **facts: Attribute
    ) -> OpenSpan:
        """Of work that began now, or then."""
        start_s = time.monotonic() if start_s is None else start_s
        context = self.context.child()
        return OpenSpan(name, kind, context, self.context.span_id, self.record, start_s, facts)

    def note(self, **facts: Attribute) -> None:
        """Adds attributes of ours, of callers' long words the beginning, without what looks like a
        secret; what is empty is left out."""
        for key, value in facts.items():
            if value != "":
                value = redact(value[:MAX_TEXT_CHARS]) if isinstance(value, str) else value
                self.attributes[f"loadout.{key}"] = value

    def fail(self, error: BaseException) -> None:
        """It ended with this: by its `reason`, or its kind, for its text may say anything."""
        if isinstance(error, Exception):
            self.error = getattr(error, "reason", "") or type(error).__name__
        else:  # cancelled, or closed
            self.attributes[CANCELLED] = True

    def end(self, end_s: float | None = None) -> None:
        """It is over now, or was then. The second time nothing happens."""
        if self.is_over:
            return
        self.is_over = True
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


# --- what is done at this moment, in this task or thread ----------------------------------------

_CURRENT: ContextVar[OpenSpan | None] = ContextVar("current_span", default=None)


def current() -> OpenSpan | None:
    """None: nothing here is traced."""
    return _CURRENT.get()


def sampled() -> OpenSpan | None:
    """The current one if it will be sent."""
    span = _CURRENT.get()
    return span if span is not None and span.context.is_sampled else None


def enter(span: OpenSpan | None) -> None:
    """It is the current one to the end of this task, and of those that it begins."""
    _CURRENT.set(span)


@contextmanager
def using(span: OpenSpan | None) -> Iterator[None]:
    """It is the current one as long as the context lasts."""
    token = _CURRENT.set(span)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def phase(name: str, **facts: Attribute) -> Iterator[OpenSpan | None]:
    """A part of the current work, which is the current one meanwhile. None: that is not traced."""
    parent = sampled()
    if parent is None:
        yield None
        return
    span = parent.child(name)
    span.note(**facts)
    try:
        with using(span):
            yield span
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        span.end()


def outgoing() -> tuple[tuple[str, str], ...]:
    """Headers for what is asked of another service for the sake of the current work."""
    span = _CURRENT.get()
    return () if span is None else span.context.headers()


def log_fields() -> dict[str, str]:
    """For lines that are logged in the course of it."""
    span = sampled()
    if span is None:
        return {}
    return {"trace_id": span.context.trace_id, "span_id": span.context.span_id}


class Phases:
    """Parts of the current work, one after the other, in a generator: none of them is current, for
    between two items its reader goes on in the same context."""

    def __init__(self) -> None:
        self._parent = sampled()
        self._open: OpenSpan | None = None

    def enter(self, name: str) -> None:
        """What came before is over."""
        if self._parent is not None:
            self.end()
            self._open = self._parent.child(name)

    def end(self, error: BaseException | None = None, **facts: Attribute) -> None:
        if self._open is not None:
            self._open.note(**facts)
            if error is not None:
                self._open.fail(error)
            self._open.end()
            self._open = None
