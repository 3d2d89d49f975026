"""Enabling traces: which callers are sampled, where spans go, and how calls end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servicekit.telemetry.spans import SpanContext, new_id, set_current
from servicekit.telemetry.tracing import (
    Tracing,
    begin_call,
    end_call,
    open_tracing,
)
from tests.support.servers.otlp import Receiver

ROOT = Path(__file__).parents[3]
PATH = "/loadout.inference.v1.InferenceService/Generate"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    yield
    set_current(None)  # calls have tasks of their own, tests have not


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "from servicekit.telemetry.tracing import open_tracing\n"
            "open_tracing('http://h:1', None, service='s', version='1')",
            "--otlp-endpoint: tracing needs OpenTelemetry, which is not installed: "
            "pip install 'loadout[otel]'",
        ),
        (
            "import loadout; loadout.Client(inference='127.0.0.1:1', tracing=True)",
            "tracing: needs OpenTelemetry: pip install 'loadout[otel]'",
        ),
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


def opened(receiver: Receiver, sample_ratio: float | None = 1.0) -> Tracing:
    tracing = open_tracing(receiver.endpoint, sample_ratio, service="service", version="1")
    assert tracing is not None
    return tracing


def call(tracing: Tracing, headers: Any = (), code: str = "OK", **how: Any) -> SpanContext:
    """A call over gRPC that ends so."""
    span = begin_call(tracing, PATH, headers)
    assert span is not None
    end_call(span, code, how.get("reason", ""), how.get("remaining_s"))
    return span.context


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_ratio_decides_without_a_caller(receiver: Receiver, ratio: float) -> None:
    tracing = opened(receiver, ratio)
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


def test_opentelemetry_variables_decide(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = opened(receiver, None)
    assert call(tracing).is_sampled is False
    tracing.close()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chosen-by-the-operator")
    tracing = opened(receiver)
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
        ({"code": "CANCELLED", "remaining_s": 0.005}, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ({"code": "OK", "remaining_s": 0.005}, "", "OK"),
    ],
)
def test_how_calls_end(receiver: Receiver, how: dict[str, Any], error: str, code: str) -> None:
    tracing = opened(receiver)
    call(tracing, **how)
    tracing.close()
    [span] = receiver.spans
    assert (span.error, span.attributes["rpc.response.status_code"]) == (error, code)
    assert span.attributes.get("loadout.cancelled") is (True if code == "CANCELLED" else None)


def test_polled_methods_are_traced_for_callers_that_trace(receiver: Receiver) -> None:
    tracing = opened(receiver)
    polled = {"Generate"}
    assert begin_call(tracing, PATH, (), polled=polled) is None
    caller = SpanContext(new_id(16), new_id(8))
    assert begin_call(tracing, PATH, caller.headers(), polled=polled) is not None
    tracing.close()


def test_long_lived_methods_are_never_traced(receiver: Receiver) -> None:
    tracing = opened(receiver)
    caller = SpanContext(new_id(16), new_id(8))
    assert begin_call(tracing, PATH, caller.headers(), long_lived={"Generate"}) is None
    tracing.close()
