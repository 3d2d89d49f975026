"""Switching traces on: who decides, what it costs where it is off, and receivers that are not
there."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_svc.otlp import OtlpTracing
from inference_svc.tracing import TracingSettings, begin_call, end_call, standard_endpoint
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.telemetry.spans import SpanContext, caller_of, enter, new_id
from tests.inference_svc.serving import Running
from tests.otlp import Receiver

ROOT = Path(__file__).parents[2]
PATH = "/loadout.inference.v1.InferenceService/Generate"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    yield
    enter(None)  # calls have tasks of their own, tests have not


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a machine that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_the_environment_may_say_where() -> None:
    http, other = "http://collector:4317", "http://traces:4317"
    plain = {"OTEL_EXPORTER_OTLP_ENDPOINT": http}
    assert standard_endpoint({}) == ""
    assert standard_endpoint(plain) == http
    assert standard_endpoint(plain | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": other}) == other
    assert standard_endpoint(plain | {"OTEL_SDK_DISABLED": "true"}) == ""
    assert standard_endpoint(plain | {"OTEL_TRACES_EXPORTER": "none"}) == ""
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL: only grpc"):
        standard_endpoint(plain | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4317' is not"):
        standard_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"})


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            f"import {service}.tracing as t; t.open_tracing(t.TracingSettings('http://h:1', None))",
            "otlp_endpoint: tracing needs OpenTelemetry, and there is none: "
            "pip install 'loadout[otel]'",
        )
        for service in ("inference_svc", "adapter_store")
    ]
    + [
        (
            "import loadout; loadout.Client(inference='127.0.0.1:1', tracing=True)",
            "tracing: needs OpenTelemetry: pip install 'loadout[otel]'",
        )
    ],
)
def test_without_the_package_the_extra_is_named(program: str, message: str) -> None:
    refuse = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'opentelemetry':\n"
        "            raise ImportError('no ' + name + ' here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", refuse + program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert message in done.stderr


def call(tracing: OtlpTracing, headers: Any = (), code: str = "OK", **how: Any) -> SpanContext:
    """A call over gRPC that ends so."""
    span = begin_call(tracing, PATH, headers)
    assert span is not None
    end_call(span, code, how.get("reason", ""), how.get("remaining_s"))
    return span.context


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_ratio_decides_where_the_caller_does_not(receiver: Receiver, ratio: float) -> None:
    tracing = OtlpTracing(TracingSettings(receiver.endpoint, ratio))
    try:
        own = call(tracing)
        assert own.is_sampled is bool(ratio)
        for is_sampled in (True, False):
            caller = SpanContext(new_id(16), new_id(8), is_sampled, "vendor=1")
            made = call(tracing, caller.headers())
            assert (made.trace_id, made.is_sampled) == (caller.trace_id, is_sampled)
            assert made.state == "vendor=1"
    finally:
        tracing.close()
    assert len(receiver.spans) == 1 + bool(ratio)


def test_the_standard_variables_decide_too(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = OtlpTracing(TracingSettings(receiver.endpoint, None))
    assert call(tracing).is_sampled is False
    tracing.close()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chosen-by-the-operator")
    tracing = OtlpTracing(TracingSettings(receiver.endpoint, 1.0))
    call(tracing)
    tracing.close()
    assert [span.service for span in receiver.spans] == ["chosen-by-the-operator"]


@pytest.mark.parametrize(
    ("how", "error", "code"),
    [
        ({"code": "OK"}, "", "OK"),
        ({"code": "NOT_FOUND", "reason": "ADAPTER_NOT_FOUND"}, "", "NOT_FOUND"),
        ({"code": "UNAVAILABLE", "reason": "DRAINING"}, "DRAINING", "UNAVAILABLE"),
        ({"code": "INTERNAL", "reason": "INTERNAL"}, "INTERNAL", "INTERNAL"),
        ({"code": "CANCELLED"}, "", "CANCELLED"),
        ({"code": "CANCELLED", "remaining_s": 5.0}, "", "CANCELLED"),
        ({"code": "CANCELLED", "remaining_s": -0.1}, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    ],
)
def test_how_calls_end(receiver: Receiver, how: dict[str, Any], error: str, code: str) -> None:
    tracing = OtlpTracing(TracingSettings(receiver.endpoint, 1.0))
    call(tracing, **how)
    tracing.close()
    [span] = receiver.spans
    assert (span.error, span.attributes["rpc.response.status_code"]) == (error, code)
    assert span.attributes.get("loadout.cancelled") is (True if code == "CANCELLED" else None)


def test_polls_are_shown_to_those_who_trace_them(receiver: Receiver) -> None:
    tracing = OtlpTracing(TracingSettings(receiver.endpoint, 1.0))
    path = "/loadout.inference.v1.InferenceService/GetServerInfo"
    assert begin_call(tracing, path, ()) is None
    assert begin_call(tracing, path, SpanContext(new_id(16), new_id(8)).headers()) is not None
    tracing.close()


def test_a_receiver_that_says_nothing_holds_up_nobody(serve: Any, silent: str) -> None:
    took_s = []

    async def body(running: Running) -> float:
        for _ in range(50):
            began_s = time.monotonic()
            await running.generate(request_id="")
            took_s.append(time.monotonic() - began_s)
        return time.monotonic()

    left_s = serve(body, otlp_endpoint=silent)
    assert time.monotonic() - left_s < 6, "CLOSE_SECONDS, and what servers take to end"
    assert sorted(took_s)[25] < 0.5


def test_an_unsampled_request_is_told_to_the_store(serve: Any, receiver: Receiver) -> None:
    """So that the store does not begin a trace of its own."""
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
