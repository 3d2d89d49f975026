"""Deficit round robin: equal parts whatever is asked, no round without an end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.policy.round_robin import DeficitRoundRobin
from tests.support.examples import examples

charges = st.lists(st.integers(1, 700), min_size=1, max_size=5)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 500), st.lists(charges, min_size=2, max_size=6))
def test_lead_is_bounded_by_quantum_and_charge(quantum: int, patterns: list[list[int]]) -> None:
    members = DeficitRoundRobin(quantum)
    taken = {f"m{i}": 0 for i in range(len(patterns))}
    for name in taken:
        members.enter(name)
    for step in range(300):
        name = members.first()
        assert name is not None
        pattern = patterns[int(name[1:])]
        charge = pattern[step % len(pattern)]
        members.charge(name, charge)
        taken[name] += charge
        largest = max(map(max, patterns))
        assert max(taken.values()) - min(taken.values()) <= quantum + largest


def test_member_is_served_for_a_quantum() -> None:
    members = DeficitRoundRobin(100)
    members.enter("a")
    members.enter("b")
    order = []
    for _ in range(8):
        order.append(members.first())
        members.charge(order[-1], 50)
    assert order == ["a", "a", "b", "b", "a", "a", "b", "b"]


def test_endless_newcomers_do_not_starve_a_member() -> None:
    members = DeficitRoundRobin(10)
    members.enter("old")
    for number in range(20):
        name = f"new-{number}"
        members.enter(name)
        if members.first() == "old":
            return
        members.charge(members.first(), 10)
        members.leave(name)
    raise AssertionError("it was never served")


def test_leaving_and_returning_gains_nothing() -> None:
    members = DeficitRoundRobin(100)
    taken = {"stays": 0, "comes": 0}
    members.enter("stays")
    for _ in range(200):
        members.enter("comes")
        name = members.first()
        members.charge(name, 30)
        taken[name] += 30
        members.leave("comes")
    assert abs(taken["stays"] - taken["comes"]) <= 130


def test_solo_use_is_forgotten_and_refunds_count() -> None:
    members = DeficitRoundRobin(10)
    members.enter("alone")
    for _ in range(100):
        assert members.first() == "alone"
        members.charge("alone", 25)
    members.enter("late")
    taken = {"alone": 0, "late": 0}
    for _ in range(40):
        name = members.first()
        members.charge(name, 25)
        taken[name] += 25
    assert abs(taken["alone"] - taken["late"]) <= 60
    name = members.first()
    members.charge(name, 10_000)
    for _ in range(50):
        assert members.first() != name
        members.charge(members.first(), 10)
    members.charge(name, -9_500)
    assert members.first() == name


def test_members_that_left_do_not_accumulate() -> None:
    members = DeficitRoundRobin(10)
    for number in range(10_000):
        members.enter(f"{number}")
        members.charge(members.first(), 10)
        members.leave(f"{number}")
    assert members.first() is None
    assert len(members._positions) + len(members._heap) < 1000
