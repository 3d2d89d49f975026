"""A store that sends spans: to a silent receiver, and in the right traces. The
whole tree is in tests/system/test_tracing.py."""

from __future__ import annotations

import socket
import time

import grpc
import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.telemetry.spans import SpanContext, new_id
from tests.support.servers.otlp import Receiver

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def receiver():
    with Receiver() as made:
        yield made


def names(receiver: Receiver, service: str = "loadout-store") -> list[str]:
    return [span.name for span in receiver.spans if span.service == service]


def test_polled_calls_are_in_their_callers_traces_only(serve, make_adapter, receiver):
    store = serve(otlp_endpoint=receiver.endpoint)
    store.client.register("french", make_adapter())
    store.client.get("french")
    context = SpanContext(new_id(16), new_id(8))
    request = pb.GetAdapterRequest(ref="french")
    store.client.stub.GetAdapter(request, metadata=context.headers())
    watch = store.client.stub.WatchAdapters(
        pb.WatchAdaptersRequest(since_revision=0), metadata=context.headers()
    )
    next(watch)
    store.stop()
    assert names(receiver).count("server GetAdapter") == 1
    assert names(receiver).count("server RegisterAdapter") == 1
    assert "server WatchAdapters" not in names(receiver)
    [get] = [span for span in receiver.spans if span.name == "server GetAdapter"]
    assert (get.trace_id, get.parent_id) == (context.trace_id, context.span_id)
    assert get.attributes["loadout.adapter"] == "default/french"


def test_pull_traces_the_build(serve, make_adapter, make_layout, receiver):
    """Once from its blob, once from the disk."""
    store = serve(otlp_endpoint=receiver.endpoint)
    digest = store.client.register("french", make_adapter()).adapter.digest
    layout_id = store.client.register_layout(make_layout())
    store.idle()
    store.stop()
    receiver.spans.clear()
    again = serve(otlp_endpoint=receiver.endpoint)
    again.client.pull(digest, layout_id)
    again.stop()
    [pull] = [span for span in receiver.spans if span.name == "server PullAdapter"]
    below = [span for span in receiver.spans if span.parent_id == pull.span_id]
    assert {span.name for span in below} == {"plan", "read", "wait", "stream", "keep"}
    [read] = [span for span in below if span.name == "read"]
    assert read.attributes["loadout.source"] == "disk"
    assert read.attributes["loadout.digest"] == digest


def test_silent_trace_receiver_delays_no_call(serve, make_adapter, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # seconds: what waits for it is seen
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = serve(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        folder = make_adapter()
        for number in range(5):
            store.client.register(f"a{number}", folder)
        with pytest.raises(grpc.RpcError):
            store.client.get("nobody")
        assert time.monotonic() - began_s < 30
        began_s = time.monotonic()
        store.stop()
        assert time.monotonic() - began_s < 30
