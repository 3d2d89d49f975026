"""Spans of loads: what a traced request waits for, whose it is, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from inference_svc.adapters.layout import ModelLayout
from servicekit.telemetry.spans import Span, SpanContext, new_id
from tests.inference_svc.adapters.loop import Loop

PULL = "loadout.adapter_store.v1.AdapterStoreService/PullAdapter"


def asker() -> SpanContext:
    return SpanContext(new_id(16), new_id(8))


@pytest.fixture(params=[0, 1 << 20], ids=["arena-only", "host-tier"])
def loop(request: pytest.FixtureRequest, store, layout: ModelLayout) -> Iterator[Loop]:
    """An arena for two images of rank 4 (7,680 bytes each)."""
    made = Loop(store, layout, 16384, request.param)
    yield made
    made.residency.cancel_all()
    made.puller.close()


def request(loop: Loop, digest: str, who: SpanContext) -> SpanContext | None:
    now_s = time.monotonic()
    loop.residency.add_waiter(digest, now_s)
    return loop.residency.trace_load(digest, who, now_s)


def load(loop: Loop, digest: str, who: SpanContext) -> list[Span]:
    request(loop, digest, who)
    loop.until(lambda: loop.residency.is_resident(digest))
    loop.residency.acquire(digest)
    return list(loop.residency.pop_spans())


def by_name(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_s)


def check_tree(spans: list[Span], who: SpanContext) -> Span:
    """One load of `who`'s, and all others within it; gives it."""
    [top] = by_name(spans, "load")
    assert (top.context.trace_id, top.parent_id) == (who.trace_id, who.span_id)
    known = {span.context.span_id: span for span in spans}
    for span in spans:
        assert span.context.trace_id == who.trace_id
        if span is not top:
            parent = known[span.parent_id]
            assert parent.start_s <= span.start_s <= span.end_s <= parent.end_s
    return top


def test_a_load_from_the_wish_to_the_row(loop: Loop, store) -> None:
    image, who = store.add("aaaa"), asker()
    spans = load(loop, "aaaa", who)
    top = check_tree(spans, who)
    num_bytes = image.header.total_bytes
    assert top.attributes == {"loadout.digest": "aaaa", "loadout.bytes": num_bytes}
    [pull], [attempt] = by_name(spans, "pull"), by_name(spans, PULL)
    assert (attempt.parent_id, attempt.kind) == (pull.context.span_id, "client")
    assert attempt.attributes["loadout.bytes"] == num_bytes
    names = [span.name for span in spans if span.parent_id == top.context.span_id]
    has_host = loop.residency.host is not None
    assert names == (["wait", "pull", "wait", "copy"] if has_host else ["wait", "pull"])
    assert loop.residency.pop_spans() == ()
    assert load(loop, "aaaa", asker()) == [], "it is here"


def test_each_attempt_is_a_span(loop: Loop, store) -> None:
    image, who = store.add("aaaa"), asker()
    store.lose_after = [1, 6]
    spans = load(loop, "aaaa", who)
    check_tree(spans, who)
    attempts = by_name(spans, PULL)
    assert [span.error for span in attempts] == ["STORE_UNAVAILABLE", "STORE_UNAVAILABLE", ""]
    assert [span.attributes["loadout.offset"] for span in attempts] == [0, 0, image.ends[0]]


def test_whoever_comes_later_gets_a_link(loop: Loop, store) -> None:
    store.add("aaaa")
    store.gate.clear()
    first, second = asker(), asker()
    assert request(loop, "aaaa", first) is None
    loop.turn()
    link = request(loop, "aaaa", second)
    assert request(loop, "aaaa", first) is None, "its own"
    store.gate.set()
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    assert check_tree(list(loop.residency.pop_spans()), first).context == link


def test_what_was_on_its_way_unasked_begins_with_who_asks(loop: Loop, store) -> None:
    """Nobody traced had asked for it: of what came before there is no span."""
    store.add("aaaa")
    store.gate.clear()
    loop.residency.add_waiter("aaaa", time.monotonic())
    loop.until(lambda: loop.residency.loads["aaaa"].job is not None)
    who = asker()
    assert request(loop, "aaaa", who) is None
    store.gate.set()
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    spans = list(loop.residency.pop_spans())
    check_tree(spans, who)
    assert by_name(spans, "pull")


def test_a_load_that_fails(loop: Loop) -> None:
    who = asker()
    request(loop, "missing", who)
    loop.until(lambda: loop.failures)
    loop.residency.remove_waiter("missing")
    spans = list(loop.residency.pop_spans())
    assert check_tree(spans, who).error == "ADAPTER_NOT_FOUND"


def test_a_load_that_nobody_waits_for_any_more(loop: Loop, store) -> None:
    store.add("aaaa")
    store.gate.clear()
    who = asker()
    request(loop, "aaaa", who)
    loop.until(lambda: loop.residency.loads["aaaa"].job is not None)
    loop.residency.remove_waiter("aaaa")
    loop.until(lambda: "aaaa" not in loop.residency.loads)
    spans = list(loop.residency.pop_spans())
    top = check_tree(spans, who)
    assert top.attributes["loadout.cancelled"] is True
    assert not any(span.error for span in spans)


def test_without_a_trace_there_are_no_spans(loop: Loop, store) -> None:
    store.add("aaaa")
    loop.load("aaaa")
    assert loop.residency.pop_spans() == ()
    assert not store.pulls[1:]
