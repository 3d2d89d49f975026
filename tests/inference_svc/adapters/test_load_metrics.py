"""What loads are said to have taken, and why adapters left; a turn of the world is a second."""

from __future__ import annotations

import time

import pytest

from inference_svc.adapters.load_metrics import LoadSource
from inference_svc.adapters.loads import LoadState
from inference_svc.adapters.slots import EvictionReason
from inference_svc.engine.status_types import HistogramState
from tests.inference_svc.engine.world import World


def total(state: HistogramState) -> tuple[int, float]:
    return sum(state.counts), state.sum_seconds


def turns(world: World, count: int) -> None:
    for _ in range(count):
        world.turn()


def test_without_a_host_tier_a_load_waits_and_is_pulled() -> None:
    world = World(0)
    world.load("a")
    assert world.residency.loads.num_by_state[LoadState.QUEUED] == 1
    world.turn()  # its pull begins
    assert world.residency.loads.num_by_state[LoadState.PULLING] == 1
    turns(world, 2)  # it opens and gets room; it is done
    times = world.residency.times
    assert total(times.wait.state) == (1, 1.0)
    assert total(times.pull.state) == (1, 2.0)
    assert total(times.load[LoadSource.STORE].state) == (1, 3.0)
    assert total(times.copy.state) == (0, 0.0)
    assert sum(world.residency.loads.num_by_state.values()) == 0


def test_with_a_host_tier_the_copy_is_part_of_it() -> None:
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


def test_a_copy_from_the_host_tier_is_a_load_without_a_pull() -> None:
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
def test_room_for_a_request_is_the_reason_to_leave(ageing_s: float, reason: EvictionReason) -> None:
    world = World(0, ageing_s)
    for digest in ("d", "c"):
        world.submit(digest, 0, 1)
        turns(world, 6)
    assert world.residency.device.evictions == {reason: 1}
    assert total(world.residency.times.device_idle.state)[0] == 1


def test_an_operators_unload_is_another() -> None:
    world = World(host_kib=16)
    world.load("a")
    turns(world, 6)
    world.unload("a")
    assert world.residency.device.evictions == {EvictionReason.UNLOAD: 1}
    assert world.residency.host is not None
    assert world.residency.host.slots.evictions == {EvictionReason.UNLOAD: 1}


@pytest.mark.parametrize(("last_used_ago_s", "expected"), [(100.0, 1), (None, 0)])
def test_what_was_never_used_has_not_been_idle(
    last_used_ago_s: float | None, expected: int
) -> None:
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
