"""Sends spans over OTLP. The only module that knows OpenTelemetry, loaded where that is wanted.

It stands between `spans` and OpenTelemetry's SDK: its sampler decides which traces are sent, its
batches leave in a thread of their own, and what there is no room for is dropped. Nobody who serves
ever waits for it.
"""

from __future__ import annotations

import logging
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

from inference_svc.tracing import TracingSettings
from servicekit.telemetry.spans import Headers, OpenSpan, Span, SpanContext, caller_of, new_id

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""For the last spans to leave. A receiver that does not answer is left without them."""
DRIFT_NS = 1_000_000
"""How far the clock may be set before the next spans follow it. Within less, all spans of a trace
have one offset, so that they lie within each other as the work did."""


class _GivenIds(IdGenerator):
    """A span has its id before OpenTelemetry hears of it: others have been told."""

    def __init__(self) -> None:
        self._local = threading.local()

    def give(self, context: SpanContext) -> None:
        """To the next span of this thread."""
        self._local.context = context

    def generate_span_id(self) -> int:
        return int(self._local.context.span_id, 16)

    def generate_trace_id(self) -> int:
        return int(self._local.context.trace_id, 16)


class OtlpTracing:
    """From any thread; see `tracing.Tracing`."""

    def __init__(self, settings: TracingSettings) -> None:
        own = {
            "service.name": settings.service,
            "service.version": settings.version,
            "service.instance.id": settings.instance,
        }
        # What the environment says wins: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        ratio = settings.sample_ratio
        if ratio is None:  # that of the environment
            self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        else:
            self._sampler = ParentBased(TraceIdRatioBased(ratio))
        self._ids = _GivenIds()
        # What is recorded has been chosen.
        provider = TracerProvider(
            ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids
        )
        self._tracer = provider.get_tracer("loadout", settings.version)
        self._exporter = OTLPSpanExporter(endpoint=settings.endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        provider.add_span_processor(self._processor)
        self._offset_ns = _offset_ns()

    def begin(self, name: str, headers: Headers) -> OpenSpan:
        caller = caller_of(headers)
        trace_id = new_id(16) if caller is None else caller.trace_id
        known = Context() if caller is None else _below(caller)
        decided = self._sampler.should_sample(known, int(trace_id, 16), name, trace.SpanKind.SERVER)
        context = SpanContext(trace_id, new_id(8), decided.decision.is_sampled())
        if caller is None:
            return OpenSpan(name, "server", context, "", self.record)
        context = replace(context, state=caller.state, is_random=caller.is_random)
        return OpenSpan(name, "server", context, caller.span_id, self.record)

    def record(self, span: Span) -> None:
        try:
            self._record(span)
        except Exception:  # a bug here must not end what it tells of
            log.exception("a span is lost")

    def _record(self, span: Span) -> None:
        parent = Context()
        if span.parent_id:
            parent = _below(replace(span.context, span_id=span.parent_id))
        offset_ns = self._refreshed_offset_ns()
        self._ids.give(span.context)
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
            log.warning("the last spans could not be sent in time")
            self._exporter.shutdown(timeout_millis=0)

    def _refreshed_offset_ns(self) -> int:
        now_ns = _offset_ns()
        if abs(now_ns - self._offset_ns) > DRIFT_NS:
            self._offset_ns = now_ns
        return self._offset_ns


def _offset_ns() -> int:
    """From the monotonic clock to the time of day."""
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
