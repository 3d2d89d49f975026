"""A receiver of spans over OTLP, and traces as outlines."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 60.0
ERROR = trace_pb2.Status.STATUS_CODE_ERROR
KINDS = {
    trace_pb2.Span.SPAN_KIND_CLIENT: "client ",
    trace_pb2.Span.SPAN_KIND_SERVER: "server ",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "",
}


@dataclass(frozen=True)
class Received:
    """A span; `links` are the (trace id, span id) of others, `error` is "" for what went well."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    error: str
    links: tuple[tuple[str, str], ...]
    events: tuple[tuple[str, dict[str, Any]], ...]

    def lies_in(self, other: Received) -> bool:
        return other.start <= self.start <= self.end <= other.end


class Receiver(pb_grpc.TraceServiceServicer):
    """Serves while the context lasts; keeps everything."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.num_calls = 0
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(0)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._news:
            self.num_calls += 1
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_received(span, service) for span in scope.spans]
            self._news.notify_all()
        return pb.ExportTraceServiceResponse()

    def until(self, condition: Callable[[], Any], timeout_s: float = WAIT_S) -> bool:
        with self._news:
            return bool(self._news.wait_for(condition, timeout_s))

    def trace(self, trace_id: str, outline: str) -> Trace:
        """The trace once it is as outlined: a line for each span, deeper ones indented by two more
        blanks, in order of their starts. Asserts that it becomes so."""
        wanted = textwrap.dedent(outline).strip().splitlines()
        self.until(lambda: self._find(trace_id).outline() == wanted)
        found = self._find(trace_id)
        assert found.outline() == wanted, "\n" + "\n".join(found.outline())
        return found

    def trace_with(self, trace_id: str, *names: str) -> Trace:
        """The trace once it has spans of these names. Asserts that it gets them."""
        wanted = set(names)
        self.until(lambda: wanted <= {span.name for span in self._find(trace_id).spans})
        found = self._find(trace_id)
        assert wanted <= {span.name for span in found.spans}, "\n".join(found.outline())
        return found

    def _find(self, trace_id: str) -> Trace:
        return Trace([span for span in self.spans if span.trace_id == trace_id])


class Trace:
    """All spans of one trace. Some know its caller from elsewhere: their parent is not in it."""

    def __init__(self, spans: list[Received]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))

    def outline(self) -> list[str]:
        ids = {span.span_id for span in self.spans}
        return [
            line
            for span in self.spans
            if span.parent_id not in ids
            for line in self._outline(span, "")
        ]

    def _outline(self, span: Received, indent: str) -> list[str]:
        lines = [f"{indent}{span.name}"]
        for child in self.children(span):
            lines += self._outline(child, indent + "  ")
        return lines

    def children(self, span: Received) -> list[Received]:
        return [each for each in self.spans if each.parent_id == span.span_id]

    def parent(self, span: Received) -> Received | None:
        return next((each for each in self.spans if each.span_id == span.parent_id), None)

    def one(self, name: str, service: str = "") -> Received:
        """The only one whose name ends so, of this service."""
        [found] = self.all(name, service)
        return found

    def all(self, name: str, service: str = "") -> list[Received]:
        return [
            span
            for span in self.spans
            if span.name.endswith(name) and service in (span.service, "")
        ]


def _received(span: Any, service: str) -> Received:
    package, _, name = span.name.rpartition("/")
    return Received(
        name=KINDS[span.kind] + (name if "." in package else span.name),
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        error=span.status.message if span.status.code == ERROR else "",
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        events=tuple((event.name, _values(event.attributes)) for event in span.events),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(map(_value, value.array_value.values))
    return getattr(value, kind)


def traced(receiver: Receiver) -> dict[str, Any]:
    """Settings that send it every span, at the latest when the server has ended."""
    return {"otlp_endpoint": receiver.endpoint, "trace_sample_ratio": 1.0}
