"""What the store counts, for Prometheus. One registry per store, nothing global."""

from __future__ import annotations

import platform
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    make_wsgi_app,
)

from adapter_store.metrics.definitions import DEFINITIONS, family

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

POLL_SECONDS = 0.05
"""How soon the HTTP thread notices that it shall end."""

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

FAULT_CODES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS")
SERVER_METHODS = ("WatchAdapters", "PullAdapter", "RegisterLayout")
"""What inference services call."""
TOKEN_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
"""What alerts count. A series that begins with its first error has no rise that a rate could see:
these begin at 0 with the process."""

# Each counter and histogram would bring a series of when it was made, which nobody asks for.
prometheus_client.disable_created_metrics()


@dataclass(frozen=True, slots=True)
class Sample:
    """A value read when Prometheus asks; `key` is of `metric_definitions`, `labels` are values."""

    key: str
    value: float
    labels: tuple[str, ...] = ()


class Metrics:
    """All metric names start with `loadout_store_`; see `metric_definitions`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests")
        self.request_seconds = self._histogram("request_seconds")
        self.rejections = self._counter("rejections")
        self.registrations = self._counter("registrations")
        self.registration_seconds = self._histogram("registration_seconds")
        self.fetched_bytes = self._counter("fetched_bytes")
        self.damaged_files = self._counter("damaged_files")
        self.compiles = self._counter("compiles")
        self.compile_seconds = self._histogram("compile_seconds")
        self.pulls = self._counter("pulls")
        self.pull_wait_seconds = self._histogram("pull_wait_seconds")
        self.pulled_bytes = self._counter("pulled_bytes")
        self._build_info = self._gauge("build_info")
        ProcessCollector(registry=self.registry)
        self._begin_at_0()

    def _begin_at_0(self) -> None:
        """So that the first of these counts in a rate."""
        for kind in ("image", "blob"):
            self.damaged_files.labels(kind)
        for result in ("ready", "incompatible", "failed"):
            self.compiles.labels(result)
        for result in ("ok", "digest_mismatch"):
            self.registrations.labels(result)
        for method in SERVER_METHODS:
            for reason in TOKEN_REFUSALS:
                self.rejections.labels(method, reason)

    def expect_calls(self, methods: Iterable[str]) -> None:
        """These will be called: their faults begin at 0."""
        for method in methods:
            for code in FAULT_CODES:
                self.requests.labels(method, code)

    def describe_store(self, version: str, compiler: str) -> None:
        """What the store is built of."""
        self._build_info.labels(version, platform.python_version(), compiler).set(1)

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

    def _counter(self, key: str) -> Counter:
        found = DEFINITIONS[key]
        return Counter(found.name, found.meaning, found.labels, registry=self.registry)

    def _gauge(self, key: str) -> Gauge:
        found = DEFINITIONS[key]
        return Gauge(found.name, found.meaning, found.labels, registry=self.registry)

    def _histogram(self, key: str) -> Histogram:
        found = DEFINITIONS[key]
        return Histogram(
            found.name, found.meaning, found.labels, buckets=_SECONDS, registry=self.registry
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
        families: dict[str, Any] = {}
        for sample in self._read():
            if sample.key not in families:
                families[sample.key] = family(sample.key)
            families[sample.key].add_metric(sample.labels, sample.value)
        yield from families.values()

    def describe(self) -> Iterator[Metric]:
        """Nothing at registration: reading needs a running store."""
        return iter(())
