"""Of sequences with one prompt one computes it, whatever ends when."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.policy.siblings import Siblings
from tests.support.examples import examples


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from(["compute", "remove", "pop"]), st.integers(0, 11))),
)
def test_one_of_a_group_is_free_until_it_has_computed(
    groups: list[str], events: list[tuple[str, int]]
) -> None:
    siblings, queued, computed = Siblings(), set[Sequence](), set[str]()
    sequences = [
        Sequence(Request(str(i), (1,), SamplingParams(), group=group, tenant=str(i % 2)))
        for i, group in enumerate(groups)
    ]
    there = list(sequences)
    for sequence in sequences:
        if not siblings.holds(sequence):
            queued.add(sequence)
        siblings.check_integrity()
    for event, number in events:
        sequence = sequences[number % len(sequences)]
        if event == "pop":
            queued.update(siblings.pop_free())
        elif event == "compute" and sequence in queued:
            siblings.computed(sequence)
            computed.add(sequence.request.group)
        elif event == "remove" and sequence in there:
            there.remove(sequence)
            assert siblings.remove(sequence) == (sequence not in queued)
            queued.discard(sequence)
        siblings.check_integrity()
        assert set(siblings.held) == set(there) - queued
        assert siblings.num_held == siblings.num_of("0") + siblings.num_of("1")
        for group in {"a", "b"} - computed:
            assert sum(each.request.group == group for each in queued) <= 1
    queued.update(siblings.pop_free())
    for group in set(groups):
        left = {each for each in there if each.request.group == group}
        assert not left or left & queued, "nobody computes the prompt"
        if group in computed:
            assert left <= queued
