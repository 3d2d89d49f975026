"""Calls of both clients as spans of the application's own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from loadout import AsyncClient, Client, errors
from loadout._routing import addresses
from tests.loadout.fakes import RETRY, Asynchronous, Blocking, FakeReplica
from tests.support import wait

GENERATE = "loadout.inference.v1.InferenceService/Generate"


class Traces:
    """What an application's provider exports."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def one(self) -> ReadableSpan:
        [span] = self.spans
        return span


class HearingReplica(FakeReplica):
    """Keeps the headers of what it is asked; fails as often as `failures` says."""

    def __init__(self) -> None:
        self.parents: list[str | None] = []
        self.failures: list[Callable[..., Any]] = []
        super().__init__()

    def generate(self, request: Message, context: Any) -> Any:
        self.parents.append(dict(context.invocation_metadata()).get("traceparent"))
        if self.failures:
            self.failures.pop(0)(request, context)
        yield from super().generate(request, context)

    def _note(self, context: Any) -> None:
        super()._note(context)
        if len(self.parents) < len(self.keys):
            self.parents.append(dict(context.invocation_metadata()).get("traceparent"))


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def replica() -> Iterator[HearingReplica]:
    made = HearingReplica()
    yield made
    made.hold.set()
    made.kill()


@pytest.fixture(params=[Blocking, Asynchronous], ids=["blocking", "async"])
def connect(request, replica, traces) -> Iterator[Callable[..., Blocking | Asynchronous]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Any:
            client = request.param(replica.address, **({"tracing": traces.provider} | options))
            stack.callback(client.close)
            return client

        yield make


def parent_of(span: ReadableSpan) -> str:
    """Returns the span as a service reads it from `traceparent`."""
    context = span.context
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_a_call_is_a_span_that_services_hear_of(connect, replica, traces) -> None:
    connect().call("complete", "hi", adapter="french")
    span = traces.one()
    assert (span.name, span.kind) == (GENERATE, SpanKind.CLIENT)
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "rpc.system.name": "grpc",
        "rpc.method": GENERATE,
        "rpc.response.status_code": "OK",
        "loadout.adapter": "french",
        "server.address": replica.address,
    }
    assert replica.parents == [parent_of(span)]


def test_so_is_one_that_answers_once(connect, replica, traces) -> None:
    connect().call("server_info")
    span = traces.one()
    assert span.name.endswith("/GetServerInfo")
    assert (span.attributes or {})["rpc.response.status_code"] == "OK"
    assert replica.parents == [parent_of(span)]


def test_a_call_that_is_left_while_its_address_is_looked_up_is_over(traces, monkeypatch) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def hang(host: str, port: str) -> list[str]:
        is_asked.set()
        assert may_answer.wait(60)
        return ["127.0.0.1"]

    monkeypatch.setattr(addresses, "lookup", hang)

    async def leave() -> None:
        async with AsyncClient("hanging.test:7080", tracing=traces.provider) as client:
            call = asyncio.create_task(client.server_info())
            await asyncio.to_thread(is_asked.wait, 30)
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    try:
        asyncio.run(leave())
    finally:
        may_answer.set()
    assert (traces.one().attributes or {})["loadout.cancelled"] is True


def test_the_applications_own_span_is_the_parent(replica, traces) -> None:
    tracer = traces.provider.get_tracer("app")
    with (
        Client(replica.address, retry=RETRY, tracing=traces.provider) as client,
        tracer.start_as_current_span("app"),
    ):
        client.complete("hi")
    call, app = traces.spans
    assert call.parent == app.context


def test_attempts_are_one_span(connect, replica, traces, fail) -> None:
    lost = fail(grpc.StatusCode.UNAVAILABLE, reason="DRAINING")
    replica.failures = [lost, lost]
    connect().call("complete", "hi")
    span = traces.one()
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
        ("retry", {"loadout.attempt": 2, "error.type": "DRAINING"}),
        ("retry", {"loadout.attempt": 3, "error.type": "DRAINING"}),
    ]
    assert (span.attributes or {})["loadout.attempts"] == 3
    assert span.status.status_code is StatusCode.UNSET
    assert replica.parents == [parent_of(span)] * 3


def test_an_error_is_told_by_its_reason(connect, replica, traces, fail) -> None:
    replica.failures = [fail(grpc.StatusCode.NOT_FOUND, reason="ADAPTER_NOT_FOUND")]
    with pytest.raises(errors.NotFound):
        connect().call("complete", "hi")
    span = traces.one()
    assert (span.status.status_code, span.status.description) == (
        StatusCode.ERROR,
        "ADAPTER_NOT_FOUND",
    )
    assert (span.attributes or {})["rpc.response.status_code"] == "NOT_FOUND"


def _is_collected(client: Any, traces: Traces) -> bool:
    """Lets the loop go on: until then it may hold the task that returned the stream."""
    client.pause()
    gc.collect()
    return bool(traces.spans)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_that_is_left_is_no_error(connect, replica, traces, caplog, how: str) -> None:
    # gRPC gives late events of an earlier test's closed loop to this one, which logs an error. The
    # record would keep the frames that run the loop, and with them the stream.
    caplog.set_level(logging.CRITICAL, logger="asyncio")
    replica.hold.clear()
    client = connect()
    stream, _ = client.start()
    assert traces.spans == (), "it goes on"
    if how == "closed":
        stream.close()
    else:
        del stream
        wait.until(lambda: _is_collected(client, traces))
    span = traces.one()
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert attributes["loadout.cancelled"] is True
    assert attributes["rpc.response.status_code"] == "CANCELLED"


def test_what_is_not_sampled_says_so(connect, replica) -> None:
    provider = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)
    connect(tracing=provider).call("complete", "hi")
    [parent] = replica.parents
    assert parent is not None
    assert not int(parent[-2:], 16) & 1


def test_a_client_that_is_not_asked_to_tells_nothing(connect, replica, traces) -> None:
    connect(tracing=False).call("complete", "hi")
    assert traces.spans == ()
    assert replica.parents == [None]
