"""The service's metrics: `loadout_inference_*`, and those by which gateways route (`vllm:*`).

Requests and calls are counted as they end; the engine's numbers are read at every scrape.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from inference_svc.core import FinishReason
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.errors import DeviceFault, QueueFull
from inference_svc.metrics.definitions import DEFINITIONS
from inference_svc.metrics.engine import Snapshot, engine_metrics, snapshot_gateway_metrics
from inference_svc.metrics.fault_report import count_faults
from inference_svc.metrics.top_adapters import AdapterCounts, TopAdapters
from inference_svc.results.base import Kind
from servicekit.telemetry.exposition import exposition
from servicekit.telemetry.histogram import WAIT_BOUNDS_S, Histogram
from servicekit.telemetry.metrics import MetricRegistry, ScrapeCollector

MAX_ADAPTERS = 50
"""Default number of adapters with series of their own."""

GENERATE = "Generate"
COMPLETION_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
GENERATE_CODES = ("OK", "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS")
COMPLETION_STATUSES = ("200", "500", "503")
"""Alerts use the rates of these. A series that begins with its first error has no increase that a
rate could show: these begin at 0 with the process."""

CANCELLED = "cancelled"
POOLED = (Kind.EMBED, Kind.SCORE, Kind.CLASSIFY)
OUTCOMES = (*(reason.value for reason in FinishReason), CANCELLED, "error")


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """Describes how a request ended: with one of OUTCOMES. `adapters` are tenant/name, none for
    the base model; each of them counts the whole request. `total_s` is the time since its arrival,
    `num_sent` the number of tokens sent. `gave_up`: its adapter was not resident in time. The
    arguments of `num_invalid_calls` of its `num_calls` of tools are no JSON objects."""

    outcome: str
    adapters: tuple[str, ...]
    num_sent: int
    total_s: float
    usage: Usage | None = None
    timings: Timings | None = None
    gave_up: bool = False
    num_calls: int = 0
    num_invalid_calls: int = 0
    kind: Kind = Kind.GENERATE


class Metrics:
    """Counts requests and exports the engine's numbers. `snapshot` is called at every scrape, in
    its thread; `max_adapters` adapters have series of their own."""

    def __init__(
        self,
        max_loras: int,
        snapshot: Callable[[], Snapshot | None],
        max_adapters: int = MAX_ADAPTERS,
    ) -> None:
        self._max_loras = max_loras
        self._snapshot = snapshot
        self.adapters = TopAdapters(max_adapters)
        self.resolve_times = Histogram(WAIT_BOUNDS_S)
        self.registry = made = MetricRegistry(DEFINITIONS)
        self._rpcs = made.counter("rpcs")
        self._http_requests = made.counter("http_requests")
        self._rejections = made.counter("rejections")
        self._requests = made.counter("requests")
        self._pooled_requests = made.counter("pooled_requests")
        self._pooled_seconds = made.histogram("pooled_request_seconds")
        self._prompt_tokens = made.counter("prompt_tokens")
        self._cached_prompt_tokens = made.counter("cached_prompt_tokens")
        self._generated_tokens = made.counter("generated_tokens")
        self._tool_calls = made.counter("tool_calls")
        self._queue_seconds = made.histogram("queue_seconds")
        self._adapter_wait_seconds = made.histogram("adapter_wait_seconds")
        self._first_token_seconds = made.histogram("first_token_seconds")
        self._request_seconds = made.histogram("request_seconds")
        self._device_faults = count_faults(made)
        self._image_fetches = made.counter("prompt_image_fetches")
        self._info = made.gauge("info")
        self._build_info = made.gauge("build_info")
        self._weight_format_info = made.gauge("weight_format_info")
        made.collect_families(self.adapters.families)
        made.collect_families(self._engine_families)
        self._gateway_registry = CollectorRegistry()
        self._gateway_registry.register(ScrapeCollector(self._gateway_families))
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
            for kind in POOLED:
                self._pooled_requests.labels(kind.value, outcome)
        for arguments in ("valid", "invalid"):
            self._tool_calls.labels(arguments)
        for code in GENERATE_CODES:
            self._rpcs.labels(GENERATE, code)
        for route in COMPLETION_ROUTES:
            for status in COMPLETION_STATUSES:
                self._http_requests.labels(route, status)
        for method in (GENERATE, *COMPLETION_ROUTES):
            self._rejections.labels(method, QueueFull.reason)

    def describe_server(
        self, base_model: str, dtype: str, device: str, versions: dict[str, str]
    ) -> None:
        """Sets the served model and the software's versions, known once the model is loaded."""
        self._info.labels(base_model, dtype, device).set(1)
        found = (versions.get("loadout", ""), platform.python_version(), versions.get("torch", ""))
        self._build_info.labels(*found).set(1)

    def describe_weights(self, formats: Iterable[tuple[str, str]]) -> None:
        """Sets the formats of weights in few bits, each with the code that multiplies by it."""
        for each in formats:
            self._weight_format_info.labels(*each).set(1)

    def count_fault(self, fault: DeviceFault) -> None:
        """Counts a fault of the device, which ends the engine."""
        self._device_faults.labels(fault.value).inc()

    def count_fetch(self, outcome: str, number: int = 1) -> None:
        """Counts fetches of prompts' images."""
        self._image_fetches.labels(outcome).inc(number)

    def exposition(self) -> tuple[bytes, str]:
        """Returns a scrape and its media type. Blocks: not for the event loop's thread."""
        return exposition(self.registry)

    def gateway_exposition(self) -> tuple[bytes, str]:
        """Returns a scrape of only the metrics for gateways, and its media type."""
        return exposition(self._gateway_registry)

    def _engine_families(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        if snapshot is None:
            return ()
        return engine_metrics(snapshot, self._max_loras, self.resolve_times.state)

    def _gateway_families(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        return () if snapshot is None else snapshot_gateway_metrics(snapshot, self._max_loras)

    def count_http(self, route: str, status: str, reason: str = "") -> None:
        """Counts an HTTP request that ended; `reason` is the error's, "" without one."""
        self._http_requests.labels(route, status).inc()
        if reason:
            self._rejections.labels(route, reason).inc()

    def count_rpc(self, method: str, code: str, reason: str = "") -> None:
        """Counts a gRPC call that ended; `reason` is the error's, "" without one."""
        self._rpcs.labels(method, code).inc()
        if reason:
            self._rejections.labels(method, reason).inc()

    def count_request(self, end: RequestEnd) -> None:
        """Counts a request that ended."""
        usage, timings = end.usage, end.timings
        counts = AdapterCounts(1, int(end.outcome == "error"), generated_tokens=end.num_sent)
        if end.kind is Kind.GENERATE:
            self._requests.labels(end.outcome).inc()
        else:
            self._pooled_requests.labels(end.kind.value, end.outcome).inc()
        self._generated_tokens.inc(end.num_sent)
        if end.gave_up:
            self._adapter_wait_seconds.observe(end.total_s)
        if usage is not None and timings is not None:
            self._count_finished(end, usage, timings)
            counts.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens:
                counts.first_tokens, counts.first_token_seconds = 1, timings.first_token_s
            if end.adapters:
                counts.load_waits, counts.load_wait_seconds = 1, timings.adapter_wait_s
        elif end.outcome == CANCELLED and not end.num_sent and end.kind is Kind.GENERATE:
            self._queue_seconds.observe(end.total_s)
            self._first_token_seconds.observe(end.total_s)
        for adapter in end.adapters or ("",):
            self.adapters.count(adapter, counts)

    def _count_finished(self, end: RequestEnd, usage: Usage, timings: Timings) -> None:
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_prompt_tokens.inc(usage.cached_prompt_tokens)
        self._queue_seconds.observe(timings.queued_s)
        self._adapter_wait_seconds.observe(timings.adapter_wait_s)
        if end.kind is not Kind.GENERATE:
            self._pooled_seconds.observe(end.total_s)
            return
        self._request_seconds.observe(end.total_s)
        if usage.completion_tokens or end.outcome == FinishReason.ABORTED.value:
            self._first_token_seconds.observe(timings.first_token_s)
