"""Spans as plain data."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from inference_svc.errors import AdapterNotFound
from servicekit.telemetry import spans
from servicekit.telemetry.spans import (
    OpenSpan,
    Phases,
    Span,
    SpanContext,
    caller_of,
    child_span,
    new_id,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def opened(*, is_sampled: bool = True) -> tuple[OpenSpan, list[Span]]:
    """A span, and what is recorded of it and below it."""
    recorded: list[Span] = []
    context = SpanContext(TRACE, SPAN, is_sampled)
    return OpenSpan("work", "server", context, "", recorded.append), recorded


@pytest.mark.parametrize(
    ("value", "is_sampled", "is_random"),
    [
        (f"00-{TRACE}-{SPAN}-01", True, False),
        (f"00-{TRACE}-{SPAN}-00", False, False),
        (f"00-{TRACE}-{SPAN}-07", True, True),
        (f"cc-{TRACE}-{SPAN}-02-what-may-come", False, True),
    ],
)
def test_a_callers_span_is_read(value: str, is_sampled: bool, is_random: bool) -> None:
    found = caller_of([("other", "1"), ("traceparent", value), ("tracestate", "a=1,b=2")])
    assert found == SpanContext(TRACE, SPAN, is_sampled, "a=1,b=2", is_random)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        b"00-bytes",
    ],
)
def test_malformed_parents_are_ignored(value: str | bytes) -> None:
    assert caller_of([("traceparent", value)]) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=\n", b"a=1"])
def test_malformed_states_are_dropped(state: str | bytes) -> None:
    found = caller_of([("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", state)])
    assert found is not None
    assert found.state == ""


def test_headers_round_trip() -> None:
    for is_sampled in (True, False):
        context = SpanContext(new_id(16), new_id(8), is_sampled, "a=1")
        assert caller_of(context.headers()) == context
        assert pickle.loads(pickle.dumps(context)) == context
        child = context.child()
        assert (child.trace_id, child.is_sampled) == (context.trace_id, is_sampled)
        assert child.span_id != context.span_id


def test_child_spans_nest_and_end() -> None:
    work, recorded = opened()
    with spans.use_span(work):
        with child_span("outer", digest="sha256:1", empty="") as outer:
            assert spans.current() is outer
            with child_span("inner"):
                [(_, parent)] = spans.outgoing_headers()
                assert spans.log_fields()["trace_id"] == TRACE
        assert spans.current() is work
    inner, top = recorded
    assert (inner.name, inner.parent_id) == ("inner", top.context.span_id)
    assert (top.name, top.parent_id) == ("outer", SPAN)
    assert inner.context.span_id in parent
    assert top.attributes == {"loadout.digest": "sha256:1"}
    assert top.start_s <= inner.start_s <= inner.end_s <= top.end_s
    assert spans.current() is None


def test_a_failed_span_has_the_reason_but_no_text() -> None:
    work, recorded = opened()
    for error in (AdapterNotFound("no adapter secret-name"), ValueError("secret")):
        with spans.use_span(work), pytest.raises(type(error)), child_span("x"):
            raise error
    assert [span.error for span in recorded] == ["ADAPTER_NOT_FOUND", "ValueError"]
    assert "secret" not in repr(recorded)


def test_cancelled_work_is_no_error() -> None:
    work, recorded = opened()
    with spans.use_span(work), pytest.raises(asyncio.CancelledError), child_span("x"):
        raise asyncio.CancelledError
    assert (recorded[0].error, recorded[0].attributes) == ("", {"loadout.cancelled": True})


def test_unsampled_work_makes_no_spans_but_headers() -> None:
    work, recorded = opened(is_sampled=False)
    with spans.use_span(work), child_span("x") as made:
        assert made is None
        assert spans.outgoing_headers() == (("traceparent", f"00-{TRACE}-{SPAN}-02"),)
        assert spans.log_fields() == {}
        Phases().enter("y")
    work.end()
    assert recorded == []


def test_a_span_ends_once() -> None:
    work, recorded = opened()
    work.set_attributes(text="x" * 1000)
    work.end()
    work.end()
    assert len(recorded) == 1
    assert recorded[0].attributes == {"loadout.text": "x" * 256}
    assert recorded[0].end_s >= recorded[0].start_s


def test_attributes_are_redacted() -> None:
    work, _ = opened()
    work.set_attributes(adapter="https://h/a?X-Amz-Signature=s3cr3t", num=3)
    assert work.attributes == {
        "loadout.adapter": "https://h/a?X-Amz-Signature=***",
        "loadout.num": 3,
    }


def test_phases_of_a_generator_follow_each_other() -> None:
    work, recorded = opened()
    with spans.use_span(work):
        phases = Phases()
    phases.enter("wait")
    phases.enter("stream")
    phases.end(bytes=7)
    phases.end()
    assert [span.name for span in recorded] == ["wait", "stream"]
    assert recorded[0].end_s <= recorded[1].start_s
    assert recorded[1].attributes == {"loadout.bytes": 7}
