"""Mapped images that are registered with a device: bounded, counted, and let go of in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.pulls import registration
from inference_svc.adapters.pulls.pull import ImageSink, PullDone
from inference_svc.adapters.pulls.registration import RegisteredImage, Registrations
from tests.support.inference.loop import Loop, assert_computes
from tests.support.inference.memory_store import MemoryMapping, MemoryRegistrar
from tests.support.wait import until


@pytest.fixture
def registrar() -> MemoryRegistrar:
    return MemoryRegistrar()


@pytest.fixture
def bounded(registrar) -> Iterator[Registrations]:
    made = Registrations(registrar, min_bytes=10, max_images=2, max_bytes=100)
    yield made
    made.close()


def register(registrations: Registrations, num_bytes: int) -> RegisteredImage:
    assert registrations.admit(num_bytes)
    mapping = MemoryMapping(b"x" * num_bytes)
    registered = registrations.register(mapping)
    mapping.release()  # its stream ends
    assert registered is not None
    return registered


def refusals(registrations: Registrations) -> dict[str, int]:
    """How often an image was not registered, by reason."""
    return {what: n for what, n in registrations.results().items() if n and what != "registered"}


def test_so_many_bytes_and_images_at_most(bounded, registrar) -> None:
    assert not bounded.admit(9)
    assert not bounded.admit(101)
    first, second = register(bounded, 60), register(bounded, 40)
    assert (bounded.num_images, bounded.num_bytes) == (2, 100)
    assert not bounded.admit(10)
    assert refusals(bounded) == {"small": 1, "too_large": 1, "too_many": 1}
    second.release()
    until(lambda: bounded.num_images == 1)
    assert not bounded.admit(41), "too many bytes, of one image more"
    first.release()
    until(lambda: not registrar.registered)
    register(bounded, 100).release()
    assert bounded.results()["registered"] == 3


def test_it_is_registered_and_mapped_while_anybody_holds_it(bounded, registrar) -> None:
    registered = register(bounded, 50)
    assert registered.hold()
    registered.release()
    assert registrar.registered
    assert bytes(registered.data) == b"x" * 50
    registered.release()
    until(lambda: not bounded.num_images)
    assert not registrar.registered
    assert bytes(registered.data) == b"?" * 50, "unmapped"
    assert not registered.hold()
    with pytest.raises(AssertionError, match="released more often"):
        registered.release()


def test_the_last_holder_does_not_wait_for_the_device(bounded, registrar, monkeypatch) -> None:
    may_end, threads = threading.Event(), []

    def unregister(data: memoryview) -> None:
        threads.append(threading.current_thread().name)
        assert may_end.wait(60)

    monkeypatch.setattr(registrar, "unregister", unregister)
    registered = register(bounded, 50)
    registered.release()
    assert bounded.num_images == 1, "its place is not free before"
    may_end.set()
    until(lambda: not bounded.num_images)
    assert threads[0].startswith("loadout-unregister")


def test_released_after_the_end_by_its_holder(bounded, registrar) -> None:
    registered = register(bounded, 50)
    bounded.close()
    registered.release()
    assert not registrar.registered
    assert not bounded.num_bytes


def test_a_device_that_refuses_is_left_alone_for_a_while(
    bounded, registrar, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO")
    registrar.error = "CUDA error 801"
    assert bounded.admit(50)
    assert bounded.register(MemoryMapping(b"x" * 50)) is None
    assert (bounded.num_images, bounded.num_bytes) == (0, 0)
    for _ in range(3):
        assert not bounded.admit(50)
    assert refusals(bounded) == {"failed": 4}
    [line] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert line.message == "shared image is copied through the host tier"
    assert (line.reason, line.why) == ("failed", "CUDA error 801")
    registrar.error = ""
    later_s = time.monotonic() + registration.RETRY_SECONDS
    monkeypatch.setattr(registration.time, "monotonic", lambda: later_s)
    register(bounded, 50).release()
    assert caplog.records[-1].message == "shared image is registered with the device"


def test_an_unexpected_error_keeps_no_place(bounded, registrar, monkeypatch) -> None:
    """CUDA that cannot start raises RuntimeError, for each image."""

    def fail(data: memoryview) -> None:
        raise RuntimeError("no CUDA runtime")

    with monkeypatch.context() as failing:
        failing.setattr(registrar, "register", fail)
        for _ in range(3):
            assert bounded.admit(50)
            with pytest.raises(RuntimeError, match="no CUDA runtime"):
                bounded.register(MemoryMapping(b"x" * 50))
    assert (bounded.num_images, bounded.num_bytes) == (0, 0)
    register(bounded, 100).release()


def test_an_image_stays_counted_if_the_device_does_not_let_go(
    bounded, registrar, monkeypatch, caplog
) -> None:
    """The device has failed; nothing may be left mapped."""

    def refuse(data: memoryview) -> None:
        raise OSError("CUDA error 700")

    monkeypatch.setattr(registrar, "unregister", refuse)
    registered = register(bounded, 50)
    registered.release()
    until(lambda: not bounded.num_images)
    assert bytes(registered.data) == b"?" * 50
    assert caplog.records[-1].why == "CUDA error 700"


def test_refused_by_the_device_it_goes_through_the_host_tier(
    store, layout: ModelLayout, registrar
) -> None:
    store.maps, registrar.error = True, "CUDA error 2"
    registrations = Registrations(registrar, min_bytes=0)
    loop = Loop(store, layout, 16384, 1 << 20, registrations=registrations)
    for digest in ("aaaa", "bbbb"):
        store.add(digest)
        assert_computes(loop, store, digest, loop.load(digest))
        assert not loop.residency.tiers.filling
    assert registrations.results()["failed"] == 2
    loop.puller.close()
    assert not any(mapping.num_holders for mapping in store.mappings)


def test_the_arena_has_it_before_the_host_tier(store, layout: ModelLayout, monkeypatch) -> None:
    """And later loads find it in the host tier."""
    store.maps = True
    registrar, may_fill = MemoryRegistrar(), threading.Event()
    registrations = Registrations(registrar, min_bytes=0)
    loop = Loop(store, layout, 16384, 1 << 20, registrations=registrations)
    write = ImageSink.write

    def late(sink: ImageSink, offset: int, data: memoryview) -> None:
        assert may_fill.wait(60)
        write(sink, offset, data)

    monkeypatch.setattr(ImageSink, "write", late)
    store.add("aaaa")
    slot, host = loop.load("aaaa"), loop.residency.host
    assert host is not None
    assert_computes(loop, store, "aaaa", slot)
    assert not any(loop.arena.pull_memory), "the host tier"
    assert (registrar.num_registered, len(registrar.registered)) == (1, 1)
    loop.residency.release("aaaa")
    loop.residency.unload("aaaa")
    assert host.slots.used_bytes, "it is being filled"
    again = loop.load("aaaa")
    assert registrar.num_registered == 1, "its second copy has the same source"
    may_fill.set()
    loop.until(lambda: not loop.residency.tiers.filling)
    until(lambda: not registrar.registered)
    assert_computes(loop, store, "aaaa", again)
    loop.residency.release("aaaa")
    loop.residency.device.remove("aaaa")
    assert_computes(loop, store, "aaaa", loop.load("aaaa"))
    assert len(store.pulls) == registrar.num_registered == 1
    loop.puller.close()


def test_an_unloaded_image_leaves_the_host_tier_once_it_is_filled(
    store, layout: ModelLayout
) -> None:
    store.maps = True
    registrations = Registrations(MemoryRegistrar(), min_bytes=0)
    loop = Loop(store, layout, 16384, 1 << 20, registrations=registrations)
    store.add("aaaa")
    loop.residency.add_waiter("aaaa", 0.0)
    loop.residency.loader.advance(0.0, [("aaaa", False)])
    while not isinstance(event := loop.events.get(timeout=60), PullDone):
        loop.residency.loader.on_pull_event(event, 0.0)
        loop.residency.loader.advance(0.0, [("aaaa", False)])
    loop.residency.loader.on_pull_event(event, 0.0)
    loop.residency.loader.advance(0.0, [("aaaa", False)])
    loop.arena.apply(loop.residency.pop_changes())
    loop.residency.loader.finish_copies(loop.arena.pop_completed_copies(), 0.0)
    loop.residency.acquire("aaaa")
    loop.residency.release("aaaa")
    host = loop.residency.host
    assert host is not None
    assert loop.residency.unload("aaaa") > 0
    assert "aaaa" in host.slots
    loop.residency.check_integrity(loop.residency.waiters)
    loop.until(lambda: "aaaa" not in host.slots)
    assert not host.slots.used_bytes
    loop.puller.close()
