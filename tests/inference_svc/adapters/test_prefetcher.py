"""Prefetching in a real Residency whose pulls the test advances: no threads, no device."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.adapters.load_states import LoadState
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import HostCopy, HostTier
from inference_svc.adapters.prefetch import CHECK_INTERVAL_S, MARGIN, PrefetchPolicy
from inference_svc.adapters.pulls.pull import PullDone, PullFailed, PullJob, PullOpened
from inference_svc.adapters.pulls.threads import Puller
from inference_svc.adapters.residency import build_residency
from inference_svc.errors import AdapterNotFound, NoRoom
from tests.support.examples import examples
from tests.support.inference.memory_store import make_image

IMAGE_BYTES = make_image("x", 4).header.total_bytes
DIGESTS = [f"digest-{number}" for number in range(6)]


@dataclass
class ManualPuller:
    """A puller whose jobs the test advances."""

    num_workers = 2
    others = None
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
    now_s: float = 1e9  # far from the machine's own clock, which nothing here may read
    puller: ManualPuller = field(default_factory=ManualPuller)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_bytes = self.num_host_images * IMAGE_BYTES
        host = HostTier(num_bytes) if num_bytes else None
        memory = memoryview(bytearray(num_bytes or 2 * IMAGE_BYTES))
        slots = Slots(2 * IMAGE_BYTES, 4)
        self.prefetch = PrefetchPolicy()
        puller = cast(Puller, self.puller)
        self.residency = build_residency(
            slots,
            host,
            memory,
            puller,
            max_rank=64,
            stall_s=60.0,
            policy=self.prefetch,
            clock=lambda: self.now_s,
        )
        self.residency.loader.set_layout("layout")

    @property
    def pull_tier(self) -> Slots:
        return self.residency.tiers.pull_tier

    def step(self, seconds: float = 0.01) -> None:
        self.now_s += seconds
        self.residency.loader.advance(self.now_s, [(digest, False) for digest in self.waiting])
        for digest in list(self.waiting):
            if self.residency.is_schedulable(digest):
                self.residency.acquire(digest)
                self.waiting.remove(digest)
                self.running.append(digest)
        changes = self.residency.pop_changes()
        self.residency.pop_ready()
        self.residency.loader.pop_failures()
        copies = [change for change in changes if isinstance(change, HostCopy)]
        self.residency.loader.finish_copies([copy.resident.digest for copy in copies], self.now_s)

    def request(self, digest: str) -> None:
        self.residency.add_waiter(digest, self.now_s)
        self.waiting.append(digest)

    def finish(self, digest: str) -> None:
        self.running.remove(digest)
        self.residency.release(digest)

    def advance_pull(self, *, fails: bool = False) -> None:
        """Advances the oldest pull by one event."""
        job = self.puller.jobs[0]
        load = self.residency.loads[job.digest]
        if job.is_cancelled or fails:
            self.puller.jobs.pop(0)
            error = None if job.is_cancelled else AdapterNotFound("gone")
            self.residency.loader.on_pull_event(PullFailed(job, error), self.now_s)
        elif load.header is None:
            header = make_image(job.digest, 4).header
            self.residency.loader.on_pull_event(PullOpened(job, header), self.now_s)
        elif load.state is LoadState.PULLING:
            self.puller.jobs.pop(0)
            self.residency.loader.on_pull_event(PullDone(job), self.now_s)

    def settle(self) -> None:
        """Steps until nothing is loading."""
        for _ in range(20):
            self.step()
            while self.puller.jobs and self.puller.jobs[0].is_cancelled:
                self.advance_pull()
            if self.puller.jobs:
                self.advance_pull()

    def use(self, digest: str, times: int = 1) -> None:
        for _ in range(times):
            self.request(digest)
            self.settle()
            assert digest in self.running
            self.finish(digest)


@pytest.fixture(params=[0, 2], ids=["arena-only", "host-tier"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def test_popular_adapter_is_prefetched(world: World) -> None:
    world.use("hot", 5)
    world.use("cold")
    world.use("lukewarm")
    assert "hot" not in world.pull_tier
    world.step(CHECK_INTERVAL_S)
    world.settle()
    assert "hot" in world.pull_tier
    assert "cold" not in world.pull_tier, "of those that may leave the one that was used first"
    counters = world.prefetch.counters
    assert (counters.prefetched, counters.prefetched_bytes) == (1, IMAGE_BYTES)
    misses = world.residency.counters.misses
    world.use("hot")
    assert world.residency.counters.misses == misses
    assert counters.hits == 1
    assert counters.wasted_bytes == 0


def test_prefetch_displaces_the_less_popular(
    world: World,
) -> None:
    world.use("warm", 4)
    world.use("hot", 8)
    world.use("cold")
    assert "warm" not in world.pull_tier
    world.step(CHECK_INTERVAL_S)
    world.settle()
    assert {resident.digest for resident in world.pull_tier.residents()} == {"hot", "warm"}


def test_prefetch_displaces_nothing_that_was_loaded_ahead(world: World) -> None:
    world.use("warm")
    world.use("lukewarm")
    for ahead in ("ahead", "ahead too"):
        world.residency.load_ahead(ahead, world.now_s)
        world.settle()
        world.residency.remove_waiter(ahead)
    world.step(CHECK_INTERVAL_S)
    world.settle()
    assert {resident.digest for resident in world.pull_tier.residents()} == {"ahead", "ahead too"}


def test_no_prefetch_while_requests_wait(world: World) -> None:
    world.use("hot", 5)
    world.use("cold")
    world.use("lukewarm")
    world.request("new")
    world.step(CHECK_INTERVAL_S)
    assert [job.digest for job in world.puller.jobs] == ["new"]
    assert world.residency.loader.next_expiry_s() is None, "there is nothing to wake up for"


def test_used_pinned_and_popular_stay(world: World) -> None:
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
    world.step(CHECK_INTERVAL_S)
    world.settle()
    assert {resident.digest for resident in device.residents()} == before
    if world.residency.host is not None:
        # A pin is the arena's: the host's copy may leave, that of what is as popular may not.
        assert {r.digest for r in world.pull_tier.residents()} == {"hot", "warm"}


def test_prefetch_evicts_nothing_from_the_arena() -> None:
    world = World(3)
    world.use("idle")
    world.use("v1", 3)
    world.residency.prefetcher.on_repointed("v1", "v2", world.now_s)
    world.step(CHECK_INTERVAL_S)
    world.settle()
    assert "v2" in world.pull_tier
    assert {r.digest for r in world.residency.device.residents()} == {"idle", "v1"}


def test_new_version_is_resident_before_a_request(world: World) -> None:
    world.use("v1", 3)
    world.residency.prefetcher.on_repointed("v1", "v2", world.now_s)
    world.step(CHECK_INTERVAL_S)
    world.settle()
    assert "v2" in world.pull_tier
    assert world.residency.is_resident("v2"), "and in the arena, where room is free"


def test_superseded_version_makes_room_for_its_successor(world: World) -> None:
    world.use("v1", 9)
    world.use("idle", 2)
    world.residency.prefetcher.on_repointed("v1", "v2", world.now_s)
    world.residency.set_superseded("v1", True)
    world.step(CHECK_INTERVAL_S)
    world.settle()
    assert {resident.digest for resident in world.pull_tier.residents()} == {"v2", "idle"}


def test_unloaded_or_failed_is_not_prefetched(world: World) -> None:
    world.use("hot", 5)
    world.residency.unload("hot")
    world.step(CHECK_INTERVAL_S)
    assert not world.puller.jobs
    world.use("hot", 5)
    world.use("cold")
    world.use("lukewarm")
    world.step(CHECK_INTERVAL_S)
    world.advance_pull(fails=True)
    world.step(3600.0)
    assert not world.puller.jobs


def test_what_is_waited_for_is_not_prefetched(world: World) -> None:
    """Its load has failed, and those who wait are not told yet."""
    for digest in ("v1", "v1"):
        world.request(digest)
        world.step(0.01)
        world.advance_pull(fails=True)
    world.request("v2")
    world.step(0.01)
    world.residency.prefetcher.on_repointed("v2", "v1", world.now_s)
    world.advance_pull(fails=True)
    world.step(CHECK_INTERVAL_S)
    assert world.prefetch.current == ""
    world.residency.check_integrity(Counter(world.waiting))


def test_operator_load_takes_over_a_prefetch(world: World) -> None:
    world.use("v1", 3)
    world.residency.prefetcher.on_repointed("v1", "v2", world.now_s)
    world.step(CHECK_INTERVAL_S)
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
        self.world.residency.prefetcher.on_repointed(old, new, self.world.now_s)

    @rule(digest=st.sampled_from(DIGESTS), is_superseded=st.booleans())
    def supersede(self, digest: str, is_superseded: bool) -> None:
        self.world.residency.set_superseded(digest, is_superseded)

    @rule(seconds=st.sampled_from([0.01, CHECK_INTERVAL_S, 5.0, 400.0]))
    def step(self, seconds: float) -> None:
        self.world.step(seconds)

    @precondition(lambda self: self.world.puller.jobs)
    @rule(fails=st.integers(0, 9))
    def advance_pull(self, fails: int) -> None:
        world = self.world
        is_prefetch = world.prefetch.current == world.puller.jobs[0].digest
        before = {r.digest: (r.users, r.pinned) for r in world.pull_tier.residents()}
        prefetched = world.prefetch.current
        waited_for = set(world.residency.waiters)
        world.advance_pull(fails=fails == 0)
        if not is_prefetch:
            return
        after = {resident.digest for resident in world.pull_tier.residents()}
        score = world.prefetch.popularity.score(prefetched, world.now_s)
        for digest in before.keys() - after - {prefetched}:
            users, is_pinned = before[digest]
            assert users == 0
            assert not is_pinned
            assert digest not in waited_for
            displaced = world.prefetch.popularity.score(digest, world.now_s)
            assert displaced * MARGIN <= score * (1 + 1e-9)

    @invariant()
    def all_agree(self) -> None:
        world = self.world
        world.residency.check_integrity(Counter(world.waiting))
        counters, prefetch = world.prefetch.counters, world.prefetch
        assert counters.wasted_bytes + sum(prefetch.unused.values()) <= counters.prefetched_bytes
        assert counters.hits <= counters.prefetched
        assert prefetch.unused.keys() <= {r.digest for r in world.pull_tier.residents()}
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


TestArena = make_case(Traffic, examples(60))
TestHostTier = pytest.mark.slow(make_case(TrafficWithHostTier, 12))
