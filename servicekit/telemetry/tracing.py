"""Decides whether traces are sent, and makes a gRPC call a span. `otlp` sends the spans."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from servicekit.errors import InvalidSetting
from servicekit.telemetry.spans import CANCELLED, Headers, OpenSpan, Span, caller_of, set_current

FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Codes that make a server's span an error. The others are their callers' mistakes."""

DEADLINE_SLACK_S = 0.05
"""A caller's deadline passes before ours by the time that its request travelled."""


class Tracing(Protocol):
    """Sends spans. All methods may be called from any thread; only `close` blocks."""

    def begin(self, name: str, headers: Headers) -> OpenSpan:
        """Opens the span of a request, in its caller's trace if the headers name one. Decides
        whether it, and everything below it, is sent."""
        ...

    def record(self, span: Span) -> None:
        """Queues the span to be sent."""
        ...

    def record_all(self, spans: Iterable[Span]) -> None: ...

    def close(self) -> None:
        """Sends the queued spans if the receiver takes them quickly."""
        ...


def open_tracing(
    endpoint: str, sample_ratio: float | None, *, service: str, version: str
) -> Tracing | None:
    """Returns None if `endpoint` (http(s)://HOST:PORT) is "". Without a `sample_ratio`
    OTEL_TRACES_SAMPLER decides. Raises InvalidSetting where OpenTelemetry is not installed."""
    if not endpoint:
        return None
    try:
        from servicekit.telemetry.otlp import OtlpTracing
    except ImportError as error:
        raise InvalidSetting(
            "--otlp-endpoint: tracing needs OpenTelemetry, which is not installed: "
            f"pip install 'loadout[otel]' ({error})",
            subject="otlp_endpoint",
        ) from error
    return OtlpTracing(endpoint, sample_ratio, service=service, version=version)


def begin_call(
    tracing: Tracing,
    path: str,
    headers: Headers,
    *,
    polled: Collection[str] = (),
    long_lived: Collection[str] = (),
) -> OpenSpan | None:
    """Opens the span of a gRPC call and makes it current; `path` is /SERVICE/METHOD. Returns None
    for methods in `long_lived`, and for `polled` ones unless the caller traces them."""
    headers, method = tuple(headers), path.rpartition("/")[2]
    if method in long_lived or (method in polled and caller_of(headers) is None):
        return None
    span = tracing.begin(path[1:], headers)
    span.attributes.update({"rpc.system.name": "grpc", "rpc.method": path[1:]})
    set_current(span)
    return span


def end_call(span: OpenSpan, code: str, reason: str, remaining_s: float | None) -> None:
    """Ends the span of a gRPC call. `remaining_s` is the rest of the caller's deadline, None
    without one: a passed deadline arrives as CANCELLED. Unauthenticated calls are not recorded."""
    if code == "UNAUTHENTICATED":
        return
    slack_s = {"OK": 0.0, "CANCELLED": DEADLINE_SLACK_S}.get(code)
    if slack_s is not None and remaining_s is not None and remaining_s <= slack_s:
        code = reason = "DEADLINE_EXCEEDED"
    span.attributes["rpc.response.status_code"] = code
    span.set_attributes(reason=reason)
    if code == "CANCELLED":
        span.attributes[CANCELLED] = True
    elif code in FAULTS:
        span.error = reason or code
    span.end()
