"""Metrics made of definitions, and their server."""

from __future__ import annotations

import gzip
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress

import pytest

from servicekit.telemetry import metrics_server
from servicekit.telemetry.exposition import exposition
from servicekit.telemetry.histogram import Histogram
from servicekit.telemetry.metrics import (
    PROCESS,
    Definitions,
    MetricRegistry,
    Namespace,
    Sample,
)
from servicekit.telemetry.metrics_server import (
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    PEER_SHARE,
    MetricsServer,
)

OWN = Namespace("service_")
DEFINITIONS = Definitions(
    "service_",
    {
        "Calls": (
            OWN.counter("calls", "Calls.", "code"),
            OWN.histogram("call_seconds", "Time of calls.", bounds_s=(1.0,)),
            OWN.summary("wait_seconds", "Time of waits."),
        ),
        "Others": (Namespace().gauge("gateway:queue", "Queue length.", "name"),),
    },
)


def text(registry: MetricRegistry) -> list[str]:
    lines = exposition(registry)[0].decode().splitlines()
    return [line for line in lines if not line.startswith(("# ", "process_"))]


def test_keys_have_no_prefix() -> None:
    assert list(DEFINITIONS) == ["calls", "call_seconds", "wait_seconds", "gateway:queue"]
    assert DEFINITIONS["calls"].exposed_name == "service_calls_total"
    with pytest.raises(KeyError):
        DEFINITIONS.family("service_calls")


def test_counted_metrics() -> None:
    registry = MetricRegistry(DEFINITIONS)
    registry.counter("calls").labels("OK").inc()
    registry.histogram("call_seconds").observe(0.5)
    registry.gauge("gateway:queue").labels("a").set(3)
    assert text(registry) == [
        'service_calls_total{code="OK"} 1.0',
        'service_call_seconds_bucket{le="1.0"} 1.0',
        'service_call_seconds_bucket{le="+Inf"} 1.0',
        "service_call_seconds_count 1.0",
        "service_call_seconds_sum 0.5",
        'gateway:queue{name="a"} 3.0',
    ]


def test_process_metrics_are_exported() -> None:
    lines = exposition(MetricRegistry(DEFINITIONS))[0].decode()
    for definition in PROCESS:
        assert f"\n{definition.exposed_name} " in lines


def test_samples_are_read_at_scrapes() -> None:
    registry = MetricRegistry(DEFINITIONS)
    read: list[Sample] = []
    registry.collect_samples(lambda: read)
    assert text(registry) == []
    read += [Sample("calls", 1, ("OK",)), Sample("calls", 2, ("INTERNAL",))]
    assert text(registry) == [
        'service_calls_total{code="OK"} 1.0',
        'service_calls_total{code="INTERNAL"} 2.0',
    ]


def test_histogram_families_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.5, 3.0):
        histogram.observe(seconds)
    registry = MetricRegistry(DEFINITIONS)
    state = histogram.state
    registry.collect_families(lambda: [DEFINITIONS.histograms("call_seconds", {(): state})])
    assert text(registry)[:3] == [
        'service_call_seconds_bucket{le="1.0"} 1.0',
        'service_call_seconds_bucket{le="2.0"} 2.0',
        'service_call_seconds_bucket{le="+Inf"} 3.0',
    ]


def test_the_server_always_answers_in_the_text_format() -> None:
    registry = MetricRegistry(DEFINITIONS)
    registry.gauge("gateway:queue").labels("a").set(3)
    with closing(MetricsServer(registry, "127.0.0.1", 0)) as server:
        accept = {"Accept": "application/openmetrics-text"}
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=accept)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert b'\ngateway:queue{name="a"} 3.0\n' in response.read()


def test_a_scrape_is_compressed_for_those_that_accept_it() -> None:
    registry = MetricRegistry(DEFINITIONS)
    scraping: list[str] = []

    def read() -> list[Sample]:
        scraping.append(threading.current_thread().name)
        return [Sample("gateway:queue", 3, ("a",))]

    registry.collect_samples(read)
    with closing(MetricsServer(registry, "127.0.0.1", 0)) as server:
        for encodings, is_compressed in (("", False), ("br, gzip;q=0.5", True), ("gzipped", False)):
            url = f"http://127.0.0.1:{server.port}/metrics"
            request = urllib.request.Request(url, headers={"Accept-Encoding": encodings})
            with urllib.request.urlopen(request, timeout=60) as response:
                data = response.read()
                assert (response.headers["Content-Encoding"] == "gzip") == is_compressed
            text = (gzip.decompress(data) if is_compressed else data).decode()
            assert 'gateway:queue{name="a"} 3.0' in text.splitlines()
    assert scraping == ["scrape"] * 3, "in threads of their own, on no event loop"


def test_health() -> None:
    """At its path, where a service says it; elsewhere there are metrics."""
    health = [False]
    registry = MetricRegistry(DEFINITIONS)
    with closing(MetricsServer(registry, "127.0.0.1", 0, lambda: health[0])) as server:
        url = f"http://127.0.0.1:{server.port}/health"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url, timeout=60)
        with caught.value as error:
            assert error.code == 503
        health[0] = True
        with urllib.request.urlopen(url, timeout=60) as response:
            assert (response.status, response.read()) == (200, b"")
        with urllib.request.urlopen(url.replace("health", "metrics"), timeout=60) as response:
            assert response.headers["Content-Type"].startswith("text/plain")


def test_only_scrapes_are_answered() -> None:
    with closing(MetricsServer(MetricRegistry(DEFINITIONS), "127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, data=b"{}", timeout=60)
    with refused.value as answer:
        assert (answer.code, answer.headers["Allow"]) == (405, "GET")


def test_a_port_in_use_is_named() -> None:
    registry = MetricRegistry(DEFINITIONS)
    with (
        closing(MetricsServer(registry, "127.0.0.1", 0)) as server,
        pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port}: "),
    ):
        MetricsServer(registry, "127.0.0.1", server.port)


def test_metrics_are_served_while_strangers_hold_half_sent_headers() -> None:
    """Of 100 connections of one address, each with more headers than are read."""
    registry = MetricRegistry(DEFINITIONS)
    registry.gauge("gateway:queue").labels("a").set(3)
    with closing(MetricsServer(registry, "127.0.0.1", 0)) as server, ExitStack() as stack:
        for _ in range(100):
            address = ("127.0.0.1", server.port)
            connection = stack.enter_context(socket.create_connection(address, 10))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 8000)
            held = [thread for thread in threading.enumerate() if thread.name == "scrape"]
            assert len(held) <= MAX_CONNECTIONS * PEER_SHARE
        # Another address has places of its own.
        other = socket.create_connection(address, 10, source_address=("127.0.0.2", 0))
        with other:
            other.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in other.recv(100)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nx: " + b"y" * MAX_HEADER_BYTES, b"GET / HT"])
def test_headers_that_are_large_or_late_end_a_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = len(sent) < MAX_HEADER_BYTES
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.05 if late else 60)
    with (
        closing(MetricsServer(MetricRegistry(DEFINITIONS), "127.0.0.1", 0)) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as connection,
        suppress(ConnectionResetError),
    ):
        connection.sendall(sent)
        assert connection.recv(100) == b""
