"""What is measured: `loadout_inference_*`, and the metrics by which gateways route (`vllm:*`).

Requests and calls are counted here as they end; what the engine counts is read at every scrape.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from inference_svc import histogram
from inference_svc.core import FinishReason
from inference_svc.engine.messages import Timings, Usage
from inference_svc.errors import QueueFull
from inference_svc.metrics.definitions import DEFINITIONS, family
from inference_svc.metrics.engine import EngineCollector, GatewayCollector, Snapshot
from inference_svc.metrics.top_adapters import AdapterCounts, BusiestAdapters

BOUNDS_S = {
    "queue_seconds": histogram.QUEUE_BOUNDS_S,
    "adapter_wait_seconds": histogram.QUEUE_BOUNDS_S,
    "first_token_seconds": histogram.QUEUE_BOUNDS_S,
    "request_seconds": histogram.REQUEST_BOUNDS_S,
}
"""Of histograms that are kept here; the engine's are its own."""

MAX_ADAPTERS = 50
"""Adapters that are counted by name, unless a setting says otherwise."""

GENERATE = "Generate"
COMPLETION_ROUTES = ("/v1/completions", "/v1/chat/completions")
GENERATE_CODES = ("OK", "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS")
COMPLETION_STATUSES = ("200", "500", "503")
"""What alerts count. A series that begins with its first error has no rise that a rate could see:
these begin at 0 with the process."""

CANCELLED = "cancelled"
OUTCOMES = (*(reason.value for reason in FinishReason), CANCELLED, "error")

# Each counter and histogram would bring a series of when it was made, which nobody asks for.
prometheus_client.disable_created_metrics()


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a generation that the engine was asked for ended, with one of OUTCOMES. `adapter` is
    tenant/name, "" for the base model. `total_s` is from its arrival, `num_sent` its tokens that
    were handed on. `gave_up`: its adapter did not come in time.
    """

    outcome: str
    adapter: str
    num_sent: int
    total_s: float
    usage: Usage | None = None
    timings: Timings | None = None
    gave_up: bool = False


class Metrics:
    """`snapshot` is called at every scrape, in the scraper's thread. Of adapters, `max_adapters`
    are counted by name."""

    def __init__(
        self,
        max_loras: int,
        snapshot: Callable[[], Snapshot | None],
        max_adapters: int = MAX_ADAPTERS,
    ) -> None:
        self.registry = CollectorRegistry()
        self.adapters = BusiestAdapters(max_adapters)
        self.resolve_times = histogram.Histogram(histogram.WAIT_BOUNDS_S)
        self._rpcs = self._counter("rpcs")
        self._http_requests = self._counter("http_requests")
        self._rejections = self._counter("rejections")
        self._requests = self._counter("requests")
        self._prompt_tokens = self._counter("prompt_tokens")
        self._cached_prompt_tokens = self._counter("cached_prompt_tokens")
        self._generated_tokens = self._counter("generated_tokens")
        self._queue_seconds = self._histogram("queue_seconds")
        self._adapter_wait_seconds = self._histogram("adapter_wait_seconds")
        self._first_token_seconds = self._histogram("first_token_seconds")
        self._request_seconds = self._histogram("request_seconds")
        self._info = self._gauge("info")
        self._build_info = self._gauge("build_info")
        self.registry.register(AdapterCollector(self.adapters))
        self.registry.register(EngineCollector(max_loras, snapshot, self.resolve_times))
        self._gateway_registry = CollectorRegistry()
        self._gateway_registry.register(GatewayCollector(max_loras, snapshot))
        ProcessCollector(registry=self.registry)
        self._begin_at_0()

    def _begin_at_0(self) -> None:
        """So that the first of these counts in a rate."""
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for code in GENERATE_CODES:
            self._rpcs.labels(GENERATE, code)
        for route in COMPLETION_ROUTES:
            for status in COMPLETION_STATUSES:
                self._http_requests.labels(route, status)
        for method in (GENERATE, *COMPLETION_ROUTES):
            self._rejections.labels(method, QueueFull.reason)

    def _counter(self, key: str) -> Counter:
        found = DEFINITIONS[key]
        return Counter(found.name, found.meaning, found.labels, registry=self.registry)

    def _gauge(self, key: str) -> Gauge:
        found = DEFINITIONS[key]
        return Gauge(found.name, found.meaning, found.labels, registry=self.registry)

    def _histogram(self, key: str) -> Histogram:
        found, bounds = DEFINITIONS[key], BOUNDS_S[key]
        return Histogram(
            found.name, found.meaning, found.labels, buckets=bounds, registry=self.registry
        )

    def describe_server(
        self, base_model: str, dtype: str, device: str, versions: dict[str, str]
    ) -> None:
        """What runs here, known once the model is loaded."""
        self._info.labels(base_model, dtype, device).set(1)
        built_of = (versions.get("loadout", ""), platform.python_version())
        self._build_info.labels(*built_of, versions.get("torch", "")).set(1)

    def exposition(self) -> tuple[bytes, str]:
        """What a scraper gets, and its media type. From any thread but the event loop's."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def gateway_exposition(self) -> tuple[bytes, str]:
        """As `exposition`, of what gateways route by alone."""
        return generate_latest(self._gateway_registry), CONTENT_TYPE_PLAIN_0_0_4

    def count_http(self, route: str, status: str, reason: str = "") -> None:
        """A request to the HTTP front has ended; `reason` is the error's, "" if there was none."""
        self._http_requests.labels(route, status).inc()
        if reason:
            self._rejections.labels(route, reason).inc()

    def count_rpc(self, method: str, code: str, reason: str = "") -> None:
        """A call has ended; `reason` is the error's, "" if there was none."""
        self._rpcs.labels(method, code).inc()
        if reason:
            self._rejections.labels(method, reason).inc()

    def count_request(self, end: RequestEnd) -> None:
        """A generation has ended."""
        usage, timings = end.usage, end.timings
        counts = AdapterCounts(1, int(end.outcome == "error"), generated_tokens=end.num_sent)
        self._requests.labels(end.outcome).inc()
        self._generated_tokens.inc(end.num_sent)
        if end.gave_up:
            self._adapter_wait_seconds.observe(end.total_s)
        if usage is not None and timings is not None:
            self._count_finished(end, usage, timings)
            counts.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens:
                counts.first_tokens, counts.first_token_seconds = 1, timings.first_token_s
            if end.adapter:
                counts.load_waits, counts.load_wait_seconds = 1, timings.adapter_wait_s
        elif end.outcome == CANCELLED and not end.num_sent:
            self._queue_seconds.observe(end.total_s)
            self._first_token_seconds.observe(end.total_s)
        self.adapters.count(end.adapter, counts)

    def _count_finished(self, end: RequestEnd, usage: Usage, timings: Timings) -> None:
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_prompt_tokens.inc(usage.cached_prompt_tokens)
        self._queue_seconds.observe(timings.queued_s)
        self._adapter_wait_seconds.observe(timings.adapter_wait_s)
        self._request_seconds.observe(end.total_s)
        if usage.completion_tokens or end.outcome == FinishReason.ABORTED.value:
            self._first_token_seconds.observe(timings.first_token_s)


class AdapterCollector(Collector):
    """The requests of the busiest adapters."""

    def __init__(self, adapters: BusiestAdapters) -> None:
        self._adapters = adapters

    def describe(self) -> list[Metric]:
        """Nothing: a look may change who is named."""
        return []

    def collect(self) -> Iterator[Metric]:
        requests, errors = family("adapter_requests"), family("adapter_errors")
        prompts, generated = family("adapter_prompt_tokens"), family("adapter_generated_tokens")
        first = family("adapter_first_token_seconds")
        waits = family("adapter_load_wait_seconds")
        for adapter, counts in self._adapters.rows().items():
            requests.add_metric([adapter], counts.requests)
            errors.add_metric([adapter], counts.errors)
            prompts.add_metric([adapter], counts.prompt_tokens)
            generated.add_metric([adapter], counts.generated_tokens)
            first.add_metric([adapter], counts.first_tokens, counts.first_token_seconds)
            waits.add_metric([adapter], counts.load_waits, counts.load_wait_seconds)
        yield from (requests, errors, prompts, generated, first, waits)
