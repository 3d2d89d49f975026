"""Many more adapters than the arena holds: pulls begin in order of service, a few at a time."""

from __future__ import annotations

import pytest

from inference_svc.adapters.load_states import LoadState
from tests.support.inference.world import SIZES, World

DIGESTS = [f"cold{number}" for number in range(60)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Three of the adapters fit its arena."""
    for digest in DIGESTS:
        monkeypatch.setitem(SIZES, digest, 3)
    return World(0, ageing_s=1e6)


def num_open(world: World) -> int:
    return sum(load.job is not None for load in world.residency.loads.by_digest.values())


def test_pulls_begin_in_order_of_service(world: World) -> None:
    """Whoever came last has the highest priority."""
    for priority, digest in enumerate(DIGESTS):
        world.submit(digest, priority, 3)
    limit = 2 * world.puller.num_workers
    for _ in range(1000):
        world.step()
        assert num_open(world) <= limit
        if not world.live:
            break
    assert world.puller.begun == DIGESTS[::-1], "each once, the most urgent first"
    assert not world.live


def test_urgent_pull_is_opened_first(world: World) -> None:
    for digest in DIGESTS[:-1]:
        world.submit(digest, 0, 30)
    while len(world.scheduler.running) < 2 or world.puller.jobs:
        world.step()
    begun = len(world.puller.begun)
    assert begun < 10
    world.submit(DIGESTS[-1], 1, 2)
    world.step()
    assert world.puller.begun[begun:] == DIGESTS[-1:]


def test_waiting_for_memory_is_not_waiting_for_the_store(world: World) -> None:
    for digest in DIGESTS:
        world.submit(digest, 0, 30)
    assert world.residency.loads.store_wait_since_s(DIGESTS[-1]) == 0.0
    for _ in range(12):
        world.step()
    loads = world.residency.loads
    assert loads[DIGESTS[-1]].state is LoadState.QUEUED
    assert loads.short[LoadState.NEEDS_PULL_ROOM]
    assert world.residency.loads.store_wait_since_s(DIGESTS[-1]) is None
    for digest in list(loads.short[LoadState.NEEDS_PULL_ROOM]):
        for sequence in world.scheduler.queue.of_key(digest):
            world.settler.end(sequence, world.now_s)
            del world.live[sequence.request.request_id]
    while world.puller.posted:
        world.residency.loader.on_pull_event(world.puller.posted.popleft(), world.now_s)
    assert world.residency.loads.store_wait_since_s(DIGESTS[-1]) == world.now_s
