"""Sends spans over OTLP. The only module that imports OpenTelemetry; loaded on demand.

It converts `spans` for OpenTelemetry's SDK, whose sampler decides which traces are sent. Batches
leave from a thread; spans that its queue has no space for are dropped, so requests never wait.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased

from servicekit.telemetry.spans import Headers, OpenSpan, Span, SpanContext, caller_of, new_id

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Bounds how long closing waits for the receiver to take the last spans."""
DRIFT_NS = 1_000_000
"""Smaller clock changes are ignored: with one offset the spans of a trace nest as the work did."""


class _GivenIds(IdGenerator):
    """Returns ids that exist already: callees know a span's id before OpenTelemetry does."""

    def __init__(self) -> None:
        self._local = threading.local()

    def set_next(self, context: SpanContext) -> None:
        """Sets the ids of the next span that this thread starts."""
        self._local.context = context

    def generate_span_id(self) -> int:
        return int(self._local.context.span_id, 16)

    def generate_trace_id(self) -> int:
        return int(self._local.context.trace_id, 16)


class OtlpTracing:
    """Implements `tracing.Tracing`; see `tracing.open_tracing` for the arguments."""

    def __init__(
        self, endpoint: str, sample_ratio: float | None, *, service: str, version: str
    ) -> None:
        own = {
            "service.name": service,
            "service.version": version,
            "service.instance.id": socket.gethostname(),
        }
        # The environment takes precedence: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        if sample_ratio is None:  # the environment's sampler
            self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        else:
            self._sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        self._ids = _GivenIds()
        # Spans that get here have been sampled already.
        provider = TracerProvider(
            ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids
        )
        self._tracer = provider.get_tracer("loadout", version)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        provider.add_span_processor(self._processor)
        self._offset_ns = _offset_ns()

    def begin(self, name: str, headers: Headers) -> OpenSpan:
        caller = caller_of(headers)
        trace_id = new_id(16) if caller is None else caller.trace_id
        parent = Context() if caller is None else _below(caller)
        decided = self._sampler.should_sample(
            parent, int(trace_id, 16), name, trace.SpanKind.SERVER
        )
        context = SpanContext(trace_id, new_id(8), decided.decision.is_sampled())
        if caller is None:
            return OpenSpan(name, "server", context, "", self.record)
        context = replace(context, state=caller.state, is_random=caller.is_random)
        return OpenSpan(name, "server", context, caller.span_id, self.record)

    def record(self, span: Span) -> None:
        try:
            self._record(span)
        except Exception:  # a bug here must not end the work that it reports
            logger.exception("a span was lost")

    def _record(self, span: Span) -> None:
        parent = Context()
        if span.parent_id:
            parent = _below(replace(span.context, span_id=span.parent_id))
        offset_ns = self._refreshed_offset_ns()
        self._ids.set_next(span.context)
        made = self._tracer.start_span(
            span.name,
            parent,
            trace.SpanKind[span.kind.upper()],
            span.attributes,
            () if span.link is None else (trace.Link(_to_otel(span.link)),),
            offset_ns + int(span.start_s * 1e9),
        )
        if span.error:
            made.set_attribute("error.type", span.error)
            made.set_status(trace.StatusCode.ERROR, span.error)
        made.end(offset_ns + int(span.end_s * 1e9))

    def record_all(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self.record(span)

    def close(self) -> None:
        closing = threading.Thread(
            target=self._processor.shutdown, name="loadout-tracing-end", daemon=True
        )
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("the last spans could not be sent in time")
            self._exporter.shutdown(timeout_millis=0)

    def _refreshed_offset_ns(self) -> int:
        now_ns = _offset_ns()
        if abs(now_ns - self._offset_ns) > DRIFT_NS:
            self._offset_ns = now_ns
        return self._offset_ns


def _offset_ns() -> int:
    """Returns the offset that turns the monotonic clock into the time of day."""
    return time.time_ns() - time.monotonic_ns()


def _below(parent: SpanContext) -> Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(_to_otel(parent)), Context())


def _to_otel(context: SpanContext) -> trace.SpanContext:
    return trace.SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(context.flags),
        trace_state=trace.TraceState.from_header([context.state] if context.state else []),
    )
