"""What is measured: `loadout_inference_*`, and the metrics by which gateways route (`vllm:*`)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inference_svc.core import (
    EngineStatus,
    FinishReason,
    HistogramState,
    ResidentAdapter,
    Timings,
    Usage,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_HISTOGRAMS = {
    "step_seconds": "Steps, from their messages to their outputs.",
    "step_host_seconds": "Of a step, what is not the model's computation.",
    "step_blocked_by_load_seconds": "Of a step, what loads of adapters cost it.",
}
"""What the engine's histograms count."""

_LEVELS = {"device": "gpu", "host": "cpu"}
"""Our tiers in the gateways' words."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine at one moment. `names` maps digests to the names known to point to them."""

    status: EngineStatus
    residents: tuple[ResidentAdapter, ...]
    names: dict[str, list[str]]
    store_connected: bool


class Metrics:
    """Counts what passes; `snapshot` is called at every scrape, in the scraper's thread."""

    def __init__(self, max_loras: int, snapshot: Callable[[], Snapshot | None]) -> None:
        self.registry = CollectorRegistry()
        self.rpcs = self._counter("rpcs", "Calls by method and status code.", "method", "code")
        self.http_requests = self._counter(
            "http_requests",
            "Requests to the HTTP front by route and status; 499: the client left first.",
            "route",
            "status",
        )
        self.requests = self._counter(
            "requests", "Generations that ended, by reason.", "finish_reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens", "Tokens of prompts that the prefix cache had."
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens sent to callers.")
        self.queue_seconds = self._histogram("queue_seconds", "Until a request first ran.")
        self.adapter_wait_seconds = self._histogram(
            "adapter_wait_seconds", "Of that, until its adapter was resident."
        )
        self.first_token_seconds = self._histogram("first_token_seconds", "Until the first token.")
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Between tokens after the first: one mean per request."
        )
        self.info = Gauge(
            "loadout_inference_info",
            "What runs here.",
            ("version", "base_model", "dtype", "device"),
            registry=self.registry,
        )
        self.registry.register(EngineCollector(max_loras, snapshot))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"loadout_inference_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(
            f"loadout_inference_{name}", help_text, buckets=SECONDS, registry=self.registry
        )

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """What a scraper gets that accepts these media types, and its type. From any thread but
        the event loop's."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def count_rpc(self, method: str, code: str) -> None:
        self.rpcs.labels(method, code).inc()

    def count_http(self, route: str, status: int) -> None:
        self.http_requests.labels(route, status).inc()

    def count_finished(
        self, reason: FinishReason, usage: Usage | None, timings: Timings | None, total_s: float
    ) -> None:
        """`total_s` is from the request's arrival to its last token."""
        self.requests.labels(reason.value).inc()
        if usage is None or timings is None:
            return
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_prompt_tokens.inc(usage.cached_prompt_tokens)
        self.queue_seconds.observe(timings.queued_s)
        self.adapter_wait_seconds.observe(timings.adapter_wait_s)
        if usage.completion_tokens:
            self.first_token_seconds.observe(timings.first_token_s)
        if usage.completion_tokens > 1:
            after_first_s = total_s - timings.first_token_s
            self.inter_token_seconds.observe(after_first_s / (usage.completion_tokens - 1))


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Scrapes are not worth a line."""


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ThreadingServerV6(_ThreadingServer):
    address_family = socket.AF_INET6


class MetricsServer:
    """Serves `metrics` over HTTP in a thread of its own. Raises OSError if it cannot listen."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        kind = _ThreadingServerV6 if ":" in host else _ThreadingServer
        app = make_wsgi_app(metrics.registry)
        try:
            self._server = make_server(host, port, app, kind, _QuietHandler)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.port: int = self._server.server_port
        # Polled often, so that closing takes no half second.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="loadout-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class EngineCollector(Collector):
    """The engine's own numbers, read when they are asked for."""

    def __init__(self, max_loras: int, snapshot: Callable[[], Snapshot | None]) -> None:
        self._max_loras = max_loras
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        if snapshot is None:
            return
        yield from self._own(snapshot)
        yield from self._requests_for_gateways(snapshot)
        yield from self._residency_for_gateways(snapshot)

    def _own(self, snapshot: Snapshot) -> Iterator[Metric]:
        status = snapshot.status
        for name, value in status.counters.items():
            help_text = f"The engine's {name.replace('_', ' ')}."
            yield CounterMetricFamily(f"loadout_inference_{name}", help_text, value=value)
        for name, state in status.histograms.items():
            yield _histogram(f"loadout_inference_{name}", _HISTOGRAMS.get(name, ""), state)
        used = GaugeMetricFamily(
            "loadout_inference_memory_used_bytes", "Memory in use.", labels=["area"]
        )
        capacity = GaugeMetricFamily(
            "loadout_inference_memory_capacity_bytes", "Memory there is.", labels=["area"]
        )
        for area, (used_bytes, capacity_bytes) in status.memory.items():
            used.add_metric([area], used_bytes)
            capacity.add_metric([area], capacity_bytes)
        yield used
        yield capacity
        yield _gauge("loadout_inference_requests_running", "In the batch.", status.num_running)
        yield _gauge("loadout_inference_requests_waiting", "In the queue.", status.num_waiting)
        yield _gauge(
            "loadout_inference_store_connected",
            "1 while the store's watch is live.",
            snapshot.store_connected,
        )

    def _requests_for_gateways(self, snapshot: Snapshot) -> Iterator[Metric]:
        status = snapshot.status
        used, capacity = status.memory.get("kv_pages", (0, 0))
        yield _gauge("vllm:num_requests_running", "In the batch.", status.num_running)
        yield _gauge("vllm:num_requests_waiting", "In the queue.", status.num_waiting)
        share = used / capacity if capacity else 0.0
        yield _gauge("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.", share)
        requests = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with requests; the value is the unix time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running = _joined_names(snapshot, status.running_digests)
        waiting = _joined_names(snapshot, status.waiting_digests)
        requests.add_metric([str(self._max_loras), running, waiting], time.time())
        yield requests

    def _residency_for_gateways(self, snapshot: Snapshot) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for each name of each resident adapter.",
            labels=["adapter_name", "level", "pinned", "rank"],
        )
        for adapter in snapshot.residents:
            labels = [_LEVELS[adapter.tier], str(adapter.pinned).lower(), str(adapter.rank)]
            for name in snapshot.names.get(adapter.digest) or [adapter.digest]:
                loaded.add_metric([name, *labels], 1)
        yield loaded
        num_on_device = sum(adapter.tier == "device" for adapter in snapshot.residents)
        yield _gauge("vllm:num_gpu_loaded_lora_adapters", "On the device.", num_on_device)
        yield _gauge("vllm:max_gpu_lora_adapters", "Most on the device.", self._max_loras)
        counters = snapshot.status.counters
        yield SummaryMetricFamily(
            "vllm:lora_adapter_load_seconds",
            "From wanting an adapter to having it.",
            count_value=int(counters.get("pulls", 0)),
            sum_value=counters.get("load_seconds", 0.0),
        )


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=float(value))


def _histogram(name: str, help_text: str, state: HistogramState) -> HistogramMetricFamily:
    totals = accumulate(state.counts)
    bounds = [*(f"{bound:g}" for bound in state.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, totals), strict=True))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=state.sum_seconds)


def _joined_names(snapshot: Snapshot, digests: tuple[str, ...]) -> str:
    names = [name for digest in digests for name in snapshot.names.get(digest) or [digest]]
    return ",".join(sorted(names))
