"""Times and spans of loads, and reasons of evictions; a step of the world is a second."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.load_metrics import LoadSource
from inference_svc.adapters.load_states import LoadState
from inference_svc.adapters.memory.eviction import EvictionReason
from servicekit.telemetry.histogram import HistogramState
from servicekit.telemetry.spans import Span, SpanContext, new_id
from tests.support.inference.loop import Loop
from tests.support.inference.world import World


def total(state: HistogramState) -> tuple[int, float]:
    return sum(state.counts), state.sum_seconds


def turns(world: World, count: int) -> None:
    for _ in range(count):
        world.step()


def test_load_times_without_host_tier() -> None:
    world = World(0)
    world.load("a")
    assert world.residency.loads.num_by_state[LoadState.QUEUED] == 1
    world.step()  # its pull begins
    assert world.residency.loads.num_by_state[LoadState.PULLING] == 1
    turns(world, 2)  # it opens and gets room; it is done
    times = world.residency.times
    assert total(times.wait.state) == (1, 1.0)
    assert total(times.pull.state) == (1, 2.0)
    assert total(times.load[LoadSource.STORE].state) == (1, 3.0)
    assert total(times.copy.state) == (0, 0.0)
    assert sum(world.residency.loads.num_by_state.values()) == 0


def test_load_times_with_host_tier() -> None:
    world = World(host_kib=16)
    world.load("a")
    turns(world, 5)
    times = world.residency.times
    assert world.residency.is_resident("a")
    assert total(times.pull.state) == (1, 2.0)
    count, copy_s = total(times.copy.state)
    assert (count, copy_s >= 1.0) == (1, True)
    waits, wait_s = total(times.wait.state)
    assert waits == 1
    assert total(times.load[LoadSource.STORE].state) == (1, wait_s + 2.0 + copy_s)
    assert total(times.load[LoadSource.HOST].state) == (0, 0.0)


def test_load_from_host_tier_has_no_pull() -> None:
    world = World(host_kib=32)
    for digest in ("a", "d", "a"):  # d needs all of the arena but 2 KiB, and a leaves for b
        world.load(digest)
        turns(world, 6)
    world.load("c")
    turns(world, 6)
    assert not world.residency.is_resident("d"), "it made room"
    world.load("d")
    turns(world, 6)
    times = world.residency.times
    assert world.residency.is_resident("d")
    assert total(times.pull.state)[0] == 3
    assert total(times.copy.state)[0] == 4
    loads = {source: total(histogram.state)[0] for source, histogram in times.load.items()}
    assert loads == {LoadSource.STORE: 3, LoadSource.HOST: 1}


@pytest.mark.parametrize(
    ("ageing_s", "reason"), [(100.0, EvictionReason.REQUEST), (1.0, EvictionReason.AGED)]
)
def test_eviction_reason_of_requests(ageing_s: float, reason: EvictionReason) -> None:
    world = World(0, ageing_s)
    for digest in ("d", "c"):
        world.submit(digest, 0, 1)
        turns(world, 6)
    assert world.residency.device.evictions == {reason: 1}
    assert total(world.residency.times.device_idle.state)[0] == 1


def test_eviction_reason_of_unload() -> None:
    world = World(host_kib=16)
    world.load("a")
    turns(world, 6)
    world.unload("a")
    assert world.residency.device.evictions == {EvictionReason.UNLOAD: 1}
    assert world.residency.host is not None
    assert world.residency.host.slots.evictions == {EvictionReason.UNLOAD: 1}


@pytest.mark.parametrize(("last_used_ago_s", "expected"), [(100.0, 1), (None, 0)])
def test_idle_time_needs_a_use(last_used_ago_s: float | None, expected: int) -> None:
    world = World(0)
    world.load("a")
    turns(world, 6)
    resident = world.residency.device.get("a")
    assert resident is not None
    used_s = 0.0 if last_used_ago_s is None else time.time() - last_used_ago_s
    resident.last_used_time_s = used_s
    idle = world.residency.times.device_idle
    world.residency.times.observe_device_eviction(resident)
    assert total(idle.state)[0] == expected
    assert expected == 0 or total(idle.state)[1] == pytest.approx(100.0, abs=5.0)


PULL = "loadout.adapter_store.v1.AdapterStoreService/PullAdapter"


def new_span() -> SpanContext:
    return SpanContext(new_id(16), new_id(8))


@pytest.fixture(params=[0, 1 << 20], ids=["arena-only", "host-tier"])
def loop(request: pytest.FixtureRequest, store, layout: ModelLayout) -> Iterator[Loop]:
    """An arena for two images of rank 4 (7,680 bytes each)."""
    made = Loop(store, layout, 16384, request.param)
    yield made
    made.residency.loader.cancel_all()
    made.puller.close()


def request(loop: Loop, digest: str, parent: SpanContext) -> SpanContext | None:
    now_s = time.monotonic()
    loop.residency.add_waiter(digest, now_s)
    return loop.residency.trace_load(digest, parent, now_s)


def load(loop: Loop, digest: str, parent: SpanContext) -> list[Span]:
    request(loop, digest, parent)
    loop.until(lambda: loop.residency.is_resident(digest))
    loop.residency.acquire(digest)
    return list(loop.residency.loads.traces.pop_spans())


def by_name(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_s)


def check_tree(spans: list[Span], parent: SpanContext) -> Span:
    """Checks that all spans are within one load, a part of `parent`; returns the load's."""
    [top] = by_name(spans, "load")
    assert (top.context.trace_id, top.parent_id) == (parent.trace_id, parent.span_id)
    known = {span.context.span_id: span for span in spans}
    for span in spans:
        assert span.context.trace_id == parent.trace_id
        if span is not top:
            outer = known[span.parent_id]
            assert outer.start_s <= span.start_s <= span.end_s <= outer.end_s
    return top


def test_spans_of_a_load(loop: Loop, store) -> None:
    image, parent = store.add("aaaa"), new_span()
    spans = load(loop, "aaaa", parent)
    top = check_tree(spans, parent)
    num_bytes = image.header.total_bytes
    assert top.attributes == {"loadout.digest": "aaaa", "loadout.bytes": num_bytes}
    [pull], [attempt] = by_name(spans, "pull"), by_name(spans, PULL)
    assert (attempt.parent_id, attempt.kind) == (pull.context.span_id, "client")
    assert attempt.attributes["loadout.bytes"] == num_bytes
    names = [span.name for span in spans if span.parent_id == top.context.span_id]
    has_host = loop.residency.host is not None
    assert names == (["wait", "pull", "wait", "copy"] if has_host else ["wait", "pull"])
    assert loop.residency.loads.traces.pop_spans() == ()
    assert load(loop, "aaaa", new_span()) == [], "it is here"


def test_each_attempt_is_a_span(loop: Loop, store) -> None:
    image, parent = store.add("aaaa"), new_span()
    store.lose_after = [1, 6]
    spans = load(loop, "aaaa", parent)
    check_tree(spans, parent)
    attempts = by_name(spans, PULL)
    assert [span.error for span in attempts] == ["STORE_UNAVAILABLE", "STORE_UNAVAILABLE", ""]
    assert [span.attributes["loadout.offset"] for span in attempts] == [0, 0, image.ends[0]]


def test_second_waiter_gets_a_link(loop: Loop, store) -> None:
    store.add("aaaa")
    store.gate.clear()
    first, second = new_span(), new_span()
    assert request(loop, "aaaa", first) is None
    loop.step()
    link = request(loop, "aaaa", second)
    assert request(loop, "aaaa", first) is None, "its own"
    store.gate.set()
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    assert check_tree(list(loop.residency.loads.traces.pop_spans()), first).context == link


def test_trace_starts_with_the_first_traced_waiter(loop: Loop, store) -> None:
    """What the load did before that has no span."""
    store.add("aaaa")
    store.gate.clear()
    loop.residency.add_waiter("aaaa", time.monotonic())
    loop.until(lambda: loop.residency.loads["aaaa"].job is not None)
    parent = new_span()
    assert request(loop, "aaaa", parent) is None
    store.gate.set()
    loop.until(lambda: loop.residency.is_resident("aaaa"))
    spans = list(loop.residency.loads.traces.pop_spans())
    check_tree(spans, parent)
    assert by_name(spans, "pull")


def test_failed_load_has_an_error(loop: Loop) -> None:
    parent = new_span()
    request(loop, "missing", parent)
    loop.until(lambda: loop.failures)
    loop.residency.remove_waiter("missing")
    spans = list(loop.residency.loads.traces.pop_spans())
    assert check_tree(spans, parent).error == "ADAPTER_NOT_FOUND"


def test_abandoned_load_is_cancelled(loop: Loop, store) -> None:
    store.add("aaaa")
    store.gate.clear()
    parent = new_span()
    request(loop, "aaaa", parent)
    loop.until(lambda: loop.residency.loads["aaaa"].job is not None)
    loop.residency.remove_waiter("aaaa")
    loop.until(lambda: "aaaa" not in loop.residency.loads)
    spans = list(loop.residency.loads.traces.pop_spans())
    top = check_tree(spans, parent)
    assert top.attributes["loadout.cancelled"] is True
    assert not any(span.error for span in spans)


def test_no_spans_without_a_trace(loop: Loop, store) -> None:
    store.add("aaaa")
    loop.load("aaaa")
    assert loop.residency.loads.traces.pop_spans() == ()
    assert not store.pulls[1:]
