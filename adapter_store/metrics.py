"""What the store counts, for Prometheus. One registry per store, nothing global."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

POLL_SECONDS = 0.05
"""How soon the HTTP thread notices that it shall end."""

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """A value read when Prometheus asks. Names that end in _total only ever go up."""

    name: str
    help_text: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class Metrics:
    """All metric names start with `loadout_store_`; labels: tier is memory or disk."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Calls answered, by method and status code.", "method", "code"
        )
        self.request_seconds = self._histogram(
            "request_seconds", "Duration of calls; streams until their end.", "method"
        )
        self.registrations = self._counter(
            "registrations",
            "Registrations and uploads, by result: ok, or the reason of the error.",
            "result",
        )
        self.registration_seconds = self._histogram(
            "registration_seconds", "From the call to the durable record."
        )
        self.fetched_bytes = self._counter("fetched_bytes", "Bytes taken from sources and uploads.")
        self.damaged_files = self._counter(
            "damaged_files", "Own files that failed their hash, by kind: image or blob.", "kind"
        )
        self.compiles = self._counter(
            "compiles", "Images compiled, by result: ready, incompatible, failed.", "result"
        )
        self.compile_seconds = self._histogram("compile_seconds", "Compiling one image.")
        self.pulls = self._counter(
            "pulls", "Pulls by result: complete, cancelled, or the reason of the error.", "result"
        )
        self.pulled_bytes = self._counter("pulled_bytes", "Image bytes sent.")

    def watch_samples(self, read: Callable[[], list[Sample]]) -> None:
        """Adds values that are read from the store whenever metrics are asked for."""
        self.registry.register(_Samples(read))

    @contextmanager
    def serving(self, host: str, port: int) -> Iterator[int]:
        """Serves /metrics over HTTP from a thread while the context lasts; gives the real port."""
        kind = _HttpServerV6 if ":" in host else _HttpServer
        app = make_wsgi_app(self.registry)
        with make_server(host, port, app, kind, _SilentHandler) as server:
            thread = threading.Thread(
                target=server.serve_forever, args=(POLL_SECONDS,), name="metrics", daemon=True
            )
            thread.start()
            try:
                yield server.server_port
            finally:
                server.shutdown()
                thread.join()

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"loadout_store_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(
            f"loadout_store_{name}", help_text, labels, buckets=_SECONDS, registry=self.registry
        )


class _HttpServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _HttpServerV6(_HttpServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its base's name)
        """Prometheus asks every few seconds: no news."""


class _Samples:
    def __init__(self, read: Callable[[], list[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._read():
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
                family = kind(
                    f"loadout_store_{sample.name}", sample.help_text, labels=list(sample.labels)
                )
                families[sample.name] = family
            family.add_metric(list(sample.labels.values()), sample.value)
        yield from families.values()

    def describe(self) -> Iterator[Metric]:
        """Nothing at registration: reading needs a running store."""
        return iter(())
