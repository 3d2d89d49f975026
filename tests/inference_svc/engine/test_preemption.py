"""Running places and pages are shares: no tenant waits for the end of another's long answers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import Sequence
from inference_svc.engine.policy.preemption import MAX_REMEMBERED, TURN_TOKENS, WAIT_S, Places
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from tests.inference_svc.engine.server import AllResident, Server
from tests.support.examples import examples

STEP_S = 0.05
LONG = 900


def busy(num_places: int, num_pages: int = 4000, tokens: int = 64) -> Server:
    """One tenant's long answers run in all places, and more of them wait."""
    server = Server(quantum=1024, num_places=num_places, gives_up_places=True)
    limits = Limits(num_places, max(tokens, num_places), 64, 1024, 2.0)
    server.scheduler = Scheduler(limits, States(Pages(num_pages, 4)), AllResident())
    server.settler.scheduler = server.scheduler
    for _ in range(4 * num_places):
        server.submit("hog", max_tokens=LONG)
    while server.scheduler.num_free:
        step(server)
    return server


def step(server: Server) -> None:
    server.now_s += STEP_S
    server.step()
    server.scheduler.check_integrity()


def steps_until_first_token(server: Server, *waiting: Sequence) -> int:
    for count in range(1, 3000):
        step(server)
        if all(sequence.num_output for sequence in waiting):
            return count
    raise AssertionError("they get nothing")


SOON = round(WAIT_S / STEP_S) + 3
"""Steps within which a tenant that waits gets a token."""


@pytest.mark.parametrize("num_places", [2, 4, 64])
def test_a_tenant_that_waits_gets_a_place(num_places: int) -> None:
    server = busy(num_places)
    other = server.submit("other", max_tokens=4)
    assert steps_until_first_token(server, other) <= SOON
    running = Counter(each.request.tenant for each in server.scheduler.running)
    assert running["hog"] == num_places - 1


def test_sixteen_tenants_get_their_places() -> None:
    """All at once, again and again."""
    server = busy(64, tokens=256)
    for _ in range(10):
        others = [server.submit(f"tenant {number}", max_tokens=4) for number in range(15)]
        assert steps_until_first_token(server, *others) <= SOON + 2


def test_a_tenant_gets_its_part_of_the_places() -> None:
    """In turns: it has some at once, and more as others' answers end. None goes back and forth."""
    server = busy(8)
    for _ in range(20):
        server.submit("other", max_tokens=LONG)
    for _ in range(100):
        step(server)
    running = Counter(each.request.tenant for each in server.scheduler.running)
    assert running["other"] >= 2
    assert server.scheduler.num_preemptions == running["other"]
    for _ in range(LONG):
        step(server)
    running = Counter(each.request.tenant for each in server.scheduler.running)
    assert running == {"hog": 4, "other": 4}


def test_more_tenants_than_places_take_turns() -> None:
    server = busy(4, tokens=64)
    others = [server.submit(f"tenant {number}", max_tokens=LONG) for number in range(10)]
    turn = TURN_TOKENS + SOON + 5
    assert steps_until_first_token(server, *others) <= 4 * turn


def test_pages_are_shares_too() -> None:
    """The places are not short, but the pages are."""
    server = Server(quantum=1024, num_places=16, gives_up_places=True)
    for _ in range(3):
        server.submit("hog", max_tokens=LONG)
    for _ in range(700):
        step(server)
    assert server.scheduler.states.pages.pool.num_free < 50 or server.scheduler.num_preemptions
    other = server.submit("other", num_prompt=300, max_tokens=4)
    assert steps_until_first_token(server, other) <= SOON + 10


def test_growth_takes_pages_of_the_largest_tenant() -> None:
    """However early its requests came, and whatever their priority."""
    server = Server(quantum=1024, num_places=16, gives_up_places=True)
    for _ in range(3):
        server.submit("hog", max_tokens=LONG, priority=9)
    for _ in range(300):
        step(server)
    other = server.submit("other", max_tokens=200)
    while other.num_output < 200:
        step(server)
    assert other.num_preemptions == 0
    assert server.scheduler.num_preemptions > 0


def test_a_scan_looks_at_no_more_tenants_than_there_are_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many wait: a scan comes 20 times a second."""
    server, num_asked = busy(8), 0

    def needed_room(sequence: Sequence) -> int:
        nonlocal num_asked
        num_asked += 1
        return 10**6  # there is never room

    for number in range(500):
        server.submit(f"tenant {number}")
    scheduler = server.scheduler
    monkeypatch.setattr(scheduler.states, "needed_room", needed_room)
    now_s = server.now_s + 2 * WAIT_S
    claims = scheduler.places.claims(scheduler.running, scheduler.queue, now_s)
    assert (claims.sequences, claims.victims) == ([], [])
    assert claims.running == scheduler.running
    assert 0 < num_asked <= 8


def test_a_tenant_alone_has_everything() -> None:
    server = busy(4)
    for _ in range(200):
        step(server)
    assert len(server.scheduler.running) == 4
    assert server.scheduler.num_preemptions == 0


def test_tenants_that_were_served_are_forgotten() -> None:
    places = Places(4, States(Pages(8, 4)))
    server = Server()
    for number in range(MAX_REMEMBERED + 10):
        places.started(server.submit(f"tenant {number}"), number * STEP_S)
    assert len(places._started_s) == MAX_REMEMBERED


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 60),
            st.sampled_from("abcde"),
            st.integers(1, 80),
            st.integers(1, 120),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 6),
    st.integers(60, 200),
)
def test_everything_ends_whatever_gives_up_places(
    requests: list[tuple[int, str, int, int, int]], num_places: int, num_pages: int
) -> None:
    server = Server(quantum=64, num_places=num_places, gives_up_places=True)
    limits = Limits(num_places, 64, 64, 64, 2.0)
    server.scheduler = Scheduler(limits, States(Pages(num_pages, 4)), AllResident())
    server.settler.scheduler = server.scheduler
    sequences = []
    for number in range(20_000):
        for due, tenant, num_prompt, max_tokens, priority in requests:
            if due == number:
                sequences.append(
                    server.submit(
                        tenant, num_prompt=num_prompt, max_tokens=max_tokens, priority=priority
                    )
                )
        step(server)
        if number > 60 and not server.scheduler.num_open:
            break
    assert all(each.num_output == each.request.sampling.max_tokens for each in sequences)
    assert server.scheduler.states.num_used == 0
