"""Scheduler and residency: whatever is asked, cancelled or short, nothing waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.inference.world import SIZES, SUMS, World

pytestmark = pytest.mark.slow

keys = st.sampled_from([*SIZES, *SUMS, ""])
adapters = st.sampled_from([*SIZES])
actions = st.one_of(
    st.tuples(st.just("submit"), keys, st.integers(0, 2), st.integers(1, 6), st.sampled_from("st")),
    st.tuples(st.just("cancel"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("preempt")),
    st.tuples(st.just("load"), adapters),
    st.tuples(st.just("unload"), adapters),
    st.tuples(st.just("pin"), adapters),
    st.tuples(st.just("step")),
)


@pytest.mark.parametrize("host_kib", [0, 10, 32], ids=["arena", "small-host", "host"])
@pytest.mark.parametrize("max_examples", [15, pytest.param(200, marks=pytest.mark.long)])
def test_every_request_ends(host_kib: int, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None)
    @given(st.lists(actions, max_size=40), st.sampled_from([3, 64]))
    def ends(asked: list[tuple], num_pages: int) -> None:
        world = World(host_kib, num_pages=num_pages)
        for action, *arguments in asked:
            getattr(world, action)(*arguments)
            world.check()
        for _ in range(400):
            if not world.live and not world.loads:
                break
            world.step()
        assert not world.live, "requests that wait for ever"
        assert not world.loads
        for _ in range(20):
            world.step()
        assert world.scheduler.states.num_used == 0
        assert all(resident.users == 0 for resident in world.residency.device.residents())

    ends()


def test_cancel_that_reorders_the_queue() -> None:
    """The load of one that was first and is now last must not be served before the others."""
    world = World(0)
    world.submit("c", 0, 30)
    for _ in range(4):
        world.step()
    world.submit("d", 0, 2)
    world.submit("b", 0, 2)
    world.submit("c", 0, 2)
    world.submit("d", 0, 2)
    for _ in range(3):
        world.step()
    world.cancel(1)
    for _ in range(200):
        world.step()
    assert not world.live
