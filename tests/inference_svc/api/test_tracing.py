"""A service that sends spans: receivers that do not answer, and what the store learns."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from loadout.inference.v1 import inference_pb2 as pb
from servicekit.telemetry.spans import SpanContext, caller_of, new_id
from tests.support.inference.serving import Running
from tests.support.servers.otlp import Receiver


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a machine that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_a_silent_receiver_delays_nobody(
    serve: Any, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # seconds: what waits for it is seen
    took_s = []

    async def body(running: Running) -> float:
        for _ in range(50):
            began_s = time.monotonic()
            await running.generate(request_id="")
            took_s.append(time.monotonic() - began_s)
        return time.monotonic()

    left_s = serve(body, otlp_endpoint=silent)
    assert time.monotonic() - left_s < 30
    assert max(took_s) < 30


def test_the_store_learns_that_a_request_is_not_sampled(serve: Any, receiver: Receiver) -> None:
    """Otherwise the store would begin a trace of its own."""
    caller = SpanContext(new_id(16), new_id(8), is_sampled=False)

    async def body(running: Running) -> None:
        request = pb.GenerateRequest(text="abc")
        metadata = caller.headers()
        assert [each async for each in running.stub.Generate(request, metadata=metadata)]
        assert running.engine.submitted[-1].trace is None
        request = pb.GenerateRequest(text="abc")
        assert [each async for each in running.stub.Generate(request)]
        context = running.engine.submitted[-1].trace
        assert caller_of(context.headers()) == context

    serve(body, otlp_endpoint=receiver.endpoint)
    assert {span.name for span in receiver.spans} >= {"server Generate", "text_completion base"}
    assert caller.trace_id not in {span.trace_id for span in receiver.spans}
