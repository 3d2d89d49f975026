"""Prefetching in a real Residency, whose pulls end when the test says so: no threads, no device."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.adapters.loads import LoadState
from inference_svc.adapters.prefetch import CHECK_INTERVAL_S, MARGIN, PrefetchPolicy
from inference_svc.adapters.pull import PullDone, PullFailed, PullJob, PullOpened
from inference_svc.adapters.puller import Puller
from inference_svc.adapters.residency import build_residency
from inference_svc.adapters.slots import Slots
from inference_svc.adapters.tiers import HostCopy, HostTier
from inference_svc.errors import AdapterNotFound, NoRoom
from tests.inference_svc.adapters.conftest import make_image

IMAGE_BYTES = make_image("x", 4).header.total_bytes
DIGESTS = [f"digest-{number}" for number in range(6)]


@dataclass
class Desk:
    """In the puller's place: keeps the jobs."""

    num_workers = 2
    jobs: list[PullJob] = field(default_factory=list)
    ended: list[PullJob] = field(default_factory=list)

    def start(self, job: PullJob) -> None:
        self.jobs.append(job)

    def cancel(self, job: PullJob) -> None:
        job.cancel()


@dataclass
class World:
    """A residency for two images in the arena, and its store."""

    num_host_images: int = 0
    now_s: float = 1000.0
    desk: Desk = field(default_factory=Desk)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_bytes = self.num_host_images * IMAGE_BYTES
        host = HostTier(num_bytes, pin_memory=False) if num_bytes else None
        memory = memoryview(bytearray(2 * IMAGE_BYTES)) if host is None else host.memory
        slots = Slots(2 * IMAGE_BYTES, 4)
        self.prefetch = PrefetchPolicy()
        puller = cast(Puller, self.desk)
        self.residency = build_residency(
            slots, host, memory, puller, max_rank=64, stall_s=60.0, policy=self.prefetch
        )
        self.residency.set_layout("layout")

    @property
    def pull_slots(self) -> Slots:
        host = self.residency.host
        return self.residency.device if host is None else host.slots

    def turn(self, seconds: float = 0.01) -> None:
        self.now_s += seconds
        self.residency.advance(self.now_s, [(digest, False) for digest in self.waiting])
        for digest in list(self.waiting):
            if self.residency.is_schedulable(digest):
                self.residency.acquire(digest)
                self.waiting.remove(digest)
                self.running.append(digest)
        changes = self.residency.pop_changes()
        self.residency.pop_ready()
        self.residency.pop_failures()
        copies = [change for change in changes if isinstance(change, HostCopy)]
        self.residency.finish_copies([copy.resident.digest for copy in copies], self.now_s)

    def request(self, digest: str) -> None:
        self.residency.add_waiter(digest, self.now_s)
        self.waiting.append(digest)

    def finish(self, digest: str) -> None:
        self.running.remove(digest)
        self.residency.release(digest)

    def pull_on(self, *, fails: bool = False) -> None:
        """The oldest pull takes its next step."""
        job = self.desk.jobs[0]
        load = self.residency.loads[job.digest]
        if job.is_cancelled or fails:
            self.desk.jobs.pop(0)
            error = None if job.is_cancelled else AdapterNotFound("gone")
            self.residency.on_pull_event(PullFailed(job, error), self.now_s)
        elif load.header is None:
            header = make_image(job.digest, 4).header
            self.residency.on_pull_event(PullOpened(job, header), self.now_s)
        elif load.state is LoadState.PULLING:
            self.desk.jobs.pop(0)
            self.residency.on_pull_event(PullDone(job), self.now_s)

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(20):
            self.turn()
            while self.desk.jobs and self.desk.jobs[0].is_cancelled:
                self.pull_on()
            if self.desk.jobs:
                self.pull_on()

    def use(self, digest: str, times: int = 1) -> None:
        for _ in range(times):
            self.request(digest)
            self.settle()
            assert digest in self.running
            self.finish(digest)


@pytest.fixture(params=[0, 2], ids=["arena-only", "host-tier"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def test_what_was_asked_for_often_comes_back_before_it_is_asked_for(world: World) -> None:
    world.use("hot", 5)
    world.use("cold")
    world.use("lukewarm")
    assert "hot" not in world.pull_slots
    world.turn(CHECK_INTERVAL_S)
    world.settle()
    assert "hot" in world.pull_slots
    assert "cold" not in world.pull_slots, "of those that may leave the one that was used first"
    counters = world.prefetch.counters
    assert (counters.prefetched, counters.prefetched_bytes) == (1, IMAGE_BYTES)
    misses = world.residency.counters.misses
    world.use("hot")
    assert world.residency.counters.misses == misses
    assert counters.hits == 1
    assert counters.wasted_bytes == 0


def test_it_takes_the_place_of_what_is_less_popular_also_if_that_was_used_last(
    world: World,
) -> None:
    world.use("warm", 4)
    world.use("hot", 8)
    world.use("cold")
    assert "warm" not in world.pull_slots
    world.turn(CHECK_INTERVAL_S)
    world.settle()
    assert {resident.digest for resident in world.pull_slots.residents()} == {"hot", "warm"}


def test_nothing_comes_while_requests_wait_for_pulls(world: World) -> None:
    world.use("hot", 5)
    world.use("cold")
    world.use("lukewarm")
    world.request("new")
    world.turn(CHECK_INTERVAL_S)
    assert [job.digest for job in world.desk.jobs] == ["new"]
    assert world.residency.next_expiry_s() is None, "there is nothing to wake up for"


def test_what_is_used_pinned_or_as_popular_stays(world: World) -> None:
    world.use("hot", 5)
    world.use("pinned")
    world.residency.device.pin("pinned")
    if world.residency.host is not None:
        world.use("warm", 4)
    else:
        world.request("used")
        world.settle()
    device = world.residency.device
    before = {resident.digest for resident in device.residents()}
    assert "pinned" in before
    world.turn(CHECK_INTERVAL_S)
    world.settle()
    assert {resident.digest for resident in device.residents()} == before
    if world.residency.host is not None:
        # A pin is the arena's: the host's copy may leave, that of what is as popular may not.
        assert {r.digest for r in world.pull_slots.residents()} == {"hot", "warm"}


def test_from_a_host_tier_nothing_leaves_the_arena_for_what_nobody_asked_for() -> None:
    world = World(3)
    world.use("idle")
    world.use("v1", 3)
    world.residency.on_repointed("v1", "v2", world.now_s)
    world.turn(CHECK_INTERVAL_S)
    world.settle()
    assert "v2" in world.pull_slots
    assert {r.digest for r in world.residency.device.residents()} == {"idle", "v1"}


def test_a_new_version_is_there_before_it_is_asked_for(world: World) -> None:
    world.use("v1", 3)
    world.residency.on_repointed("v1", "v2", world.now_s)
    world.turn(CHECK_INTERVAL_S)
    world.settle()
    assert "v2" in world.pull_slots
    assert world.residency.is_resident("v2"), "and in the arena, where room is free"


def test_what_is_unloaded_or_gone_is_not_brought_back(world: World) -> None:
    world.use("hot", 5)
    world.residency.unload("hot")
    world.turn(CHECK_INTERVAL_S)
    assert not world.desk.jobs
    world.use("hot", 5)
    world.use("cold")
    world.use("lukewarm")
    world.turn(CHECK_INTERVAL_S)
    world.pull_on(fails=True)
    world.turn(3600.0)
    assert not world.desk.jobs


def test_an_operator_who_loads_what_is_on_its_way_takes_it_over(world: World) -> None:
    world.use("v1", 3)
    world.residency.on_repointed("v1", "v2", world.now_s)
    world.turn(CHECK_INTERVAL_S)
    assert world.prefetch.current == "v2"
    world.residency.add_waiter("v2", world.now_s, count=False)
    world.settle()
    assert world.prefetch.current == ""
    assert world.residency.is_resident("v2")
    world.residency.remove_waiter("v2")
    world.residency.check_integrity(Counter())


class Traffic(RuleBasedStateMachine):
    """Anything, in any order: what prefetching displaces was idle and clearly less popular."""

    num_host_images = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.num_host_images)
        self.pinned: set[str] = set()

    @rule(digest=st.sampled_from(DIGESTS))
    def request(self, digest: str) -> None:
        self.world.request(digest)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.running)))

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.world.waiting))
        self.world.waiting.remove(digest)
        self.world.residency.remove_waiter(digest)

    @rule(digest=st.sampled_from(DIGESTS), pins=st.booleans())
    def pin(self, digest: str, pins: bool) -> None:
        device = self.world.residency.device
        if not self.world.residency.is_resident(digest):
            return
        with contextlib.suppress(NoRoom):
            _ = device.pin(digest) if pins else device.unpin(digest)

    @rule(old=st.sampled_from(DIGESTS), new=st.sampled_from(DIGESTS))
    def repoint(self, old: str, new: str) -> None:
        self.world.residency.on_repointed(old, new, self.world.now_s)

    @rule(seconds=st.sampled_from([0.01, CHECK_INTERVAL_S, 5.0, 400.0]))
    def turn(self, seconds: float) -> None:
        self.world.turn(seconds)

    @precondition(lambda self: self.world.desk.jobs)
    @rule(fails=st.integers(0, 9))
    def pull_on(self, fails: int) -> None:
        world = self.world
        ahead = world.prefetch.current == world.desk.jobs[0].digest
        before = {r.digest: (r.users, r.pinned) for r in world.pull_slots.residents()}
        brought = world.prefetch.current
        wanted = set(world.residency.waiters)
        world.pull_on(fails=fails == 0)
        if not ahead:
            return
        after = {resident.digest for resident in world.pull_slots.residents()}
        score = world.prefetch.popularity.score(brought, world.now_s)
        for digest in before.keys() - after - {brought}:
            users, is_pinned = before[digest]
            assert users == 0
            assert not is_pinned
            assert digest not in wanted
            displaced = world.prefetch.popularity.score(digest, world.now_s)
            assert displaced * MARGIN <= score * (1 + 1e-9)

    @invariant()
    def all_agree(self) -> None:
        world = self.world
        world.residency.check_integrity(Counter(world.waiting))
        counters, prefetch = world.prefetch.counters, world.prefetch
        assert counters.wasted_bytes + sum(prefetch.unused.values()) <= counters.prefetched_bytes
        assert counters.hits <= counters.prefetched
        assert prefetch.unused.keys() <= {r.digest for r in world.pull_slots.residents()}
        if prefetch.current:
            assert prefetch.current in world.residency.loads
            assert prefetch.current not in world.residency.waiters


class TrafficWithHostTier(Traffic):
    num_host_images = 3


def make_case(machine: Any, max_examples: int) -> Any:
    machine.TestCase.settings = settings(
        max_examples=max_examples, stateful_step_count=40, deadline=None
    )
    return machine.TestCase


TestArena = make_case(Traffic, 60)
TestHostTier = make_case(TrafficWithHostTier, 12)
