"""Pages and recurrent states of many sequences under random use: a step always finds the state of
its sequence's own tokens, also when it is computed twice.

The test has a memory of its own, in which a unit's contents are the tokens that it stands for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from inference_svc.core import EMPTY_STATE, Request, SamplingParams, Sequence
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.recurrent import Recurrent
from inference_svc.engine.policy.states.states import States

MAX_SEQUENCES = 3
PAGE_SIZE = 2
BORDER = 4
NUM_PAGES = 24

Contents = tuple[object, ...]


def contents_of(sequence: Sequence, num_tokens: int) -> Contents:
    """Returns what the state behind so many tokens depends on: the adapter, if it is active by
    then, and the tokens."""
    is_active = num_tokens > sequence.request.activation
    return (sequence.request.key if is_active else "", *sequence.token_ids[:num_tokens])


class StatesMachine(RuleBasedStateMachine):
    """Sequences of few different tokens, so that prefixes are often equal."""

    caching = True
    has_recurrent = True

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.slots: dict[int, Contents] = {}
        self.pages: dict[int, Contents] = {}

    @initialize(num_stored=st.integers(0, 4))
    def make(self, num_stored: int) -> None:
        recurrent = None
        if self.has_recurrent:
            num_slots = 2 * MAX_SEQUENCES + num_stored
            recurrent = Recurrent(
                num_slots, MAX_SEQUENCES, BORDER, page_size=PAGE_SIZE, caching=self.caching
            )
        self.states = States(Pages(NUM_PAGES, PAGE_SIZE, self.caching), recurrent)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        key=st.sampled_from(["", "sha256:a"]),
        activation=st.integers(0, 13),
    )
    def submit(self, prompt: list[int], key: str, activation: int) -> None:
        activation = min(activation, len(prompt) - 1) if key else 0
        request = Request("r", tuple(prompt), SamplingParams(), key, activation=activation)
        self.waiting.append(Sequence(request))

    @rule()
    def start(self) -> None:
        if not self.waiting or len(self.running) == MAX_SEQUENCES:
            return
        sequence = self.waiting[0]
        needed, free = self.states.needed_room(sequence), self.states.free_room
        num_cached = self.states.start(sequence)
        assert (num_cached is not None) == (needed <= free)
        if num_cached is not None:
            self.running.append(self.waiting.pop(0))
            assert num_cached < len(sequence.token_ids)
            sequence.num_computed = num_cached
            self.check_state(sequence)

    @rule(data=st.data(), num_times=st.integers(1, 2))
    def step(self, data: st.DataObject, num_times: int) -> None:
        """Computes a chunk of a running sequence, perhaps again after a failure."""
        if not self.running:
            return
        sequence = data.draw(st.sampled_from(self.running))
        num_left = len(sequence.token_ids) - sequence.num_computed
        start = sequence.num_computed
        wanted = data.draw(st.integers(1, num_left))
        count, borders = wanted, [border for border, _ in sequence.state_borders]
        if start + count > sequence.num_reserved and not self.states.allocate(
            sequence, start + count
        ):
            assert [border for border, _ in sequence.state_borders] == borders
            self.preempt(sequence)
            return
        mixed: Contents = ("of several adapters",) if sequence.num_kept else ()
        for _ in range(num_times):
            self.check_state(sequence)
            end = start + count
            for position in range(start, end):
                page = sequence.page_ids[position // PAGE_SIZE]
                at = page * PAGE_SIZE + position % PAGE_SIZE
                self.pages[at] = mixed or contents_of(sequence, position + 1)
            if self.has_recurrent:
                assert sequence.state_written not in (EMPTY_STATE, sequence.state_read)
                self.slots[sequence.state_written] = mixed or contents_of(sequence, end)
                for border, slot in sequence.state_borders:
                    if start < border < end:
                        self.slots[slot] = mixed or contents_of(sequence, border)
        sequence.num_computed = end
        if end >= sequence.settles_at:
            self.states.settle(sequence, start)
        if end == len(sequence.token_ids):
            sequence.token_ids.append(data.draw(st.integers(0, 1)))
            sequence.has_sampled = True

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """The sequence goes on with another adapter, and keeps its state: from now on it is of
        both."""
        if self.running:
            sequence = data.draw(st.sampled_from(self.running))
            sequence.request = replace(sequence.request, key="sha256:b", activation=0)
            sequence.num_kept, sequence.prefix_keys = sequence.num_computed, []

    @rule(data=st.data())
    def preempt_one(self, data: st.DataObject) -> None:
        if self.running:
            self.preempt(data.draw(st.sampled_from(self.running)))

    def preempt(self, sequence: Sequence) -> None:
        self.states.release(sequence)
        sequence.num_computed = sequence.num_kept = 0
        self.running.remove(sequence)
        self.waiting.append(sequence)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            sequence = data.draw(st.sampled_from(self.running))
            self.running.remove(sequence)
            self.states.release(sequence)

    @rule()
    def sleep(self) -> None:
        """All memory is lost."""
        while self.running:
            self.preempt(self.running[-1])
        self.states.forget_prefixes()
        assert self.states.num_used == self.states.num_known == 0
        self.slots.clear()
        self.pages.clear()

    def check_state(self, sequence: Sequence) -> None:
        """Asserts that the memory holds the state of the computed tokens, unless it is of several
        adapters."""
        if sequence.num_kept:
            return
        for position in range(sequence.num_computed):
            page = sequence.page_ids[position // PAGE_SIZE]
            found = self.pages[page * PAGE_SIZE + position % PAGE_SIZE]
            assert found == contents_of(sequence, position + 1)
        if self.has_recurrent and sequence.num_computed:
            state = self.slots[sequence.state_read]
            assert state == contents_of(sequence, sequence.num_computed)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "states"):
            self.states.check_integrity(self.running)
            assert EMPTY_STATE not in self.slots
            if not self.caching:
                assert self.states.num_known == 0


class PagesOnlyMachine(StatesMachine):
    has_recurrent = False


class UncachedMachine(StatesMachine):
    caching = False


QUICK = settings(max_examples=15, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("machine", [StatesMachine, PagesOnlyMachine, UncachedMachine])
def test_random_use(machine: type[StatesMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.long
@pytest.mark.parametrize("machine", [StatesMachine, PagesOnlyMachine, UncachedMachine])
def test_much_more_random_use(machine: type[StatesMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=600))


def started(states: States, num_tokens: int) -> Sequence:
    sequence = Sequence(Request("r", tuple(range(num_tokens)), SamplingParams()))
    num_cached = states.start(sequence)
    assert num_cached is not None
    sequence.num_computed = num_cached
    return sequence


def compute(states: States, sequence: Sequence, num_tokens: int) -> None:
    """Computes a sequence up to so many tokens, in steps as large as may be."""
    while sequence.num_computed < num_tokens:
        start = sequence.num_computed
        assert states.allocate(sequence, num_tokens)
        sequence.num_computed = num_tokens
        states.settle(sequence, start)


def hybrid(num_stored: int = 4, num_pages: int = 64) -> States:
    num_slots = 2 * MAX_SEQUENCES + num_stored
    return States(
        Pages(num_pages, PAGE_SIZE), Recurrent(num_slots, MAX_SEQUENCES, 8, page_size=PAGE_SIZE)
    )


def test_equal_prefixes_share_a_state() -> None:
    states = hybrid()
    first = started(states, 23)
    compute(states, first, 23)
    states.release(first)
    second = started(states, 23)
    assert second.num_computed == 22
    assert second.state_read != EMPTY_STATE
    third = started(states, 23)
    assert third.state_read == second.state_read
    states.check_integrity([second, third])


def test_without_its_state_no_prefix_is_known() -> None:
    states = hybrid(num_stored=0)
    first = started(states, 20)
    compute(states, first, 20)
    states.release(first)
    assert states.num_known > 0
    for _ in range(2):  # they take all slots, whose keys are dropped
        others = [started(states, 3) for _ in range(MAX_SEQUENCES)]
        for each in others:
            compute(states, each, 3)
        for each in others:
            states.release(each)
    again = started(states, 20)
    assert again.num_computed == 0
    assert again.state_read == EMPTY_STATE
    states.check_integrity([again])


@pytest.mark.parametrize("chunks", [(23,), (7, 16), (22, 1), (1,) * 23])
def test_states_are_stored_at_borders_and_where_a_prompts_last_page_ends(
    chunks: tuple[int, ...],
) -> None:
    states, end = hybrid(), 0
    first = started(states, 23)
    for count in chunks:
        end += count
        if end > first.num_reserved:
            assert states.allocate(first, end)
        start, first.num_computed = first.num_computed, end
        states.settle(first, start)
        states.check_integrity([first])
    assert states.recurrent is not None
    assert states.recurrent.pool.num_known == 3  # behind 8, 16, and 22 tokens
    for num_tokens, known in ((23, 22), (22, 16), (17, 16), (16, 8), (8, 0)):
        other = started(states, num_tokens)
        assert other.num_computed == known
        states.release(other)


def test_borders_take_no_slot_that_a_running_sequence_needs() -> None:
    states = hybrid(num_stored=1, num_pages=200)
    running = [started(states, 60) for _ in range(MAX_SEQUENCES)]
    for each in running:
        assert states.allocate(each, 60)
    assert [len(each.state_borders) for each in running] == [1, 0, 0]
    states.check_integrity(running)
    for each in running:
        start, each.num_computed = each.num_computed, 60
        states.settle(each, start)
    states.check_integrity(running)


@pytest.mark.parametrize("has_recurrent", [False, True])
def test_state_of_several_adapters_is_not_shared(has_recurrent: bool) -> None:
    states = hybrid() if has_recurrent else States(Pages(64, PAGE_SIZE))
    sequence = started(states, 23)
    compute(states, sequence, 9)
    num_known = states.num_known
    sequence.num_kept, sequence.prefix_keys = 9, []  # as a move to another version leaves it
    compute(states, sequence, 16)  # a border
    compute(states, sequence, 23)
    assert states.num_known == num_known
    states.check_integrity([sequence])
