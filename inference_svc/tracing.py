"""Whether traces are sent, and how servers say what they did. OpenTelemetry itself is in `otlp`."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from servicekit.settings import check_endpoint
from servicekit.telemetry.spans import CANCELLED, Headers, OpenSpan, Span, caller_of, enter

SERVICE_NAME = "loadout-inference"

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

POLLED = frozenset({"GetServerInfo", "ListResidentAdapters"})
"""Asked for every second by whoever watches: shown only in the traces of those who ask."""
FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Codes by which a server's span is an error. The others are their callers' mistakes."""


class Tracing(Protocol):
    """From any thread; nothing but `close` ever waits."""

    def begin(self, name: str, headers: Headers) -> OpenSpan:
        """Of what a caller asks for, in its trace if it names one. It is decided here whether it is
        sent, and all that is done for it."""
        ...

    def record(self, span: Span) -> None:
        """Sends it, soon."""
        ...

    def record_all(self, spans: Iterable[Span]) -> None: ...

    def close(self) -> None:
        """Sends what there is as far as that goes at once."""
        ...


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """`endpoint` is http(s)://HOST:PORT. `sample_ratio` None: as OTEL_TRACES_SAMPLER says."""

    endpoint: str
    sample_ratio: float | None
    version: str = ""
    service: str = SERVICE_NAME
    instance: str = socket.gethostname()


def open_tracing(settings: TracingSettings) -> Tracing | None:
    """None: it is not wanted. Raises ValueError where OpenTelemetry is not installed."""
    if not settings.endpoint:
        return None
    try:
        from inference_svc.otlp import OtlpTracing
    except ImportError as error:
        raise ValueError(
            "otlp_endpoint: tracing needs OpenTelemetry, and there is none: "
            f"pip install 'loadout[otel]' ({error})"
        ) from error
    return OtlpTracing(settings)


def standard_endpoint(environment: Mapping[str, str]) -> str:
    """Where OpenTelemetry's own variables say that spans go; "": nowhere. Raises ValueError naming
    the variable."""
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return ""
    variable = next((name for name in ENDPOINTS if environment.get(name)), "")
    if not variable:
        return ""
    for name in PROTOCOLS:
        if environment.get(name, "grpc") != "grpc":
            raise ValueError(f"{name}: only grpc is spoken; OTEL_TRACES_EXPORTER=none: not at all")
    try:
        return check_endpoint(environment[variable])
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def begin_call(tracing: Tracing, path: str, headers: Headers) -> OpenSpan | None:
    """Of a call over gRPC, from now on the current span; `path` is /SERVICE/METHOD. None: it is
    not traced."""
    headers = tuple(headers)
    if path.rpartition("/")[2] in POLLED and caller_of(headers) is None:
        return None
    span = tracing.begin(path[1:], headers)
    span.attributes.update({"rpc.system.name": "grpc", "rpc.method": path[1:]})
    enter(span)
    return span


def end_call(span: OpenSpan, code: str, reason: str, remaining_s: float | None) -> None:
    """`remaining_s` is what the caller's deadline leaves; None: it has none. Whoever leaves, and
    whose deadline ends, reads as CANCELLED here. Strangers leave no trace."""
    if code == "UNAUTHENTICATED":
        return
    if code in ("OK", "CANCELLED") and remaining_s is not None and remaining_s <= 0:
        code = reason = "DEADLINE_EXCEEDED"
    span.attributes["rpc.response.status_code"] = code
    span.note(reason=reason)
    if code == "CANCELLED":
        span.attributes[CANCELLED] = True
    elif code in FAULTS:
        span.error = reason or code
    span.end()
