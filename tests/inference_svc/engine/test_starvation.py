"""No request waits for longer than the bound, whatever others send: the bound is spelled out here.

Time is the world's: a step of a second. What is aged gets half of its tenant's tokens in order of
arrival, and tenants are served in rounds, so a request waits at most for the ageing limit, then for
twice what came before it of its tenant, and for as much of every other tenant's; each takes at most
the end of what runs, its load, and its own run."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_svc.core import Sequence
from tests.support.examples import examples
from tests.support.inference.world import SIZES, World

pytestmark = pytest.mark.slow

AGEING_S = 10.0
LONGEST = 6
"""Steps that a request runs, at most."""
LOAD = 2 * len(SIZES) + 2
"""Steps until an adapter that has room is there: two events, behind those of all others."""

kinds = st.tuples(st.sampled_from([*SIZES, ""]), st.integers(0, 3), st.integers(1, LONGEST))


class Flood:
    """Keeps so many requests of every tenant waiting, cycling through what it sends."""

    def __init__(self, world: World, sent: dict[str, list[tuple[str, int, int]]], depth: int):
        self.world, self.sent, self.depth = world, sent, depth
        self.num_sent = 0

    def step(self) -> None:
        for name, pattern in self.sent.items():
            while num_waiting(self.world, name) < self.depth:
                self.num_sent += 1
                self.world.submit(*pattern[self.num_sent % len(pattern)], name)
        self.world.step()


def num_waiting(world: World, tenant: str) -> int:
    return len(world.scheduler.queue.tenant(tenant) or ())


def bound_steps(num_tenants: int, num_before: int) -> float:
    """Twice each, for what goes by priority and by rounds once it is aged."""
    each = 2 * LONGEST + LOAD
    return AGEING_S + num_tenants * 2 * (num_before + 1) * each


@pytest.mark.parametrize("host_kib", [0, 16], ids=["arena", "host"])
@settings(max_examples=examples(75), deadline=None)
@given(
    st.lists(st.lists(kinds, min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([*SIZES, ""]), st.sampled_from([-1, 0])),
        min_size=1,
        max_size=4,
    ),
)
@example([[("b", 0, 2), ("c", 0, 2)]], 2, [(1, "d", -1)])  # two that must go, one after the other
def test_wait_is_bounded(
    host_kib: int,
    floods: list[list[tuple[str, int, int]]],
    depth: int,
    victims: list[tuple[int, str, int]],
) -> None:
    """Requests of low priority among floods of every adapter, priority and tenant."""
    world = World(host_kib, AGEING_S)
    flood = Flood(world, {f"t{i}": sent for i, sent in enumerate(floods)}, depth)
    due: list[tuple[Sequence, float]] = []
    for step in range(31):
        for _moment, digest, priority in (v for v in victims if v[0] == step):
            limit = bound_steps(len(floods), num_waiting(world, "t0"))
            due.append((world.submit(digest, priority, 2, "t0"), world.now_s + limit))
        flood.step()
    while any(sequence.started_s is None for sequence, _ in due):
        flood.step()
        for sequence, limit_s in due:
            assert sequence.started_s is not None or world.now_s <= limit_s, "starved"


def test_traffic_of_one_adapter_does_not_overtake_for_ever() -> None:
    """A, B, A, A, A, ...: with room for one of them, B runs once it is aged, and only
    then: before, it would push out what others wait for."""
    for ageing_s, starts in ((AGEING_S, True), (math.inf, False)):
        world = World(0, ageing_s)
        flood = Flood(world, {"": [("d", 0, 3)]}, 3)
        for _ in range(10):
            flood.step()
        other = world.submit("c", 0, 2)
        for _ in range(int(AGEING_S) - 1):
            flood.step()
        assert other.started_s is None
        for _ in range(60):
            flood.step()
        assert (other.started_s is not None) == starts
