"""The pool of units: references and keys under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from inference_svc.engine.policy.states.pool import UnitPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = UnitPool(8)
        self.holders: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if self.pool.can_allocate(count):
            units = self.pool.allocate(count)
            for unit in units:
                assert not any(unit in held for held in self.holders), "handed out twice"
                self.key_of.pop(unit, None)
            self.holders.append(units)

    @rule(data=st.data(), key=st.sampled_from([b"x", b"y", b"z"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        held = [unit for units in self.holders for unit in units]
        if held:
            unit = data.draw(st.sampled_from(held))
            if unit not in self.key_of and key not in self.key_of.values():
                self.key_of[unit] = key
            self.pool.publish(unit, key)

    @rule(key=st.sampled_from([b"x", b"y", b"z"]))
    def share(self, key: bytes) -> None:
        unit = self.pool.find(key)
        if unit is None:
            assert key not in self.key_of.values()
        else:
            assert self.key_of[unit] == key
            self.pool.share([unit])
            self.holders.append([unit])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.forget_keys()
        self.key_of.clear()

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity(self.holders)
        held = [unit for units in self.holders for unit in units]
        for unit in set(held):
            is_private = held.count(unit) == 1 and unit not in self.key_of
            assert self.pool.is_private(unit) == is_private


PoolMachine.TestCase.settings = settings(max_examples=15, deadline=None)
TestPool = PoolMachine.TestCase


@pytest.mark.long
def test_many_more() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=400, deadline=None))


def test_unkeyed_units_are_reused_before_prefix_ends() -> None:
    pool = UnitPool(4)
    first, second, third = pool.allocate(3)
    pool.publish(first, b"1")
    pool.publish(second, b"2")
    pool.release([first, second, third])
    order = pool.allocate(4)
    assert order[-2:] == [second, first]


def test_without_caching_nothing_is_shared() -> None:
    pool = UnitPool(4, caching=False)
    (unit,) = pool.allocate(1)
    pool.publish(unit, b"1")
    assert pool.find(b"1") is None
