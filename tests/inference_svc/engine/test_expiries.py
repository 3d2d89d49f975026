"""Sequences by their moments."""

from __future__ import annotations

from inference_svc.core import Request, SamplingParams, Sequence, SequenceState
from inference_svc.engine.policy.expiries import Expiries


def sequences(count: int) -> list[Sequence]:
    return [Sequence(Request(f"{n}", (1,), SamplingParams())) for n in range(count)]


def test_due_sequences_come_once_in_order() -> None:
    expiries = Expiries()
    first, second, third, ended = sequences(4)
    for sequence, moment_s in ((second, 2.0), (first, 1.0), (third, 3.0), (ended, 0.5)):
        expiries.add(sequence, moment_s)
    ended.state = SequenceState.FINISHED
    assert expiries.next_s() == 1.0
    assert list(expiries.due(2.0)) == [first, second]
    assert list(expiries.due(2.0)) == []
    expiries.add(first, 2.5)
    assert expiries.next_s() == 2.5
    assert list(expiries.due(9.0)) == [first, third]
    assert expiries.next_s() is None


def test_sequence_that_ends_during_iteration_is_skipped() -> None:
    expiries = Expiries()
    first, second = sequences(2)
    expiries.add(first, 1.0)
    expiries.add(second, 1.0)
    came = []
    for sequence in expiries.due(1.0):
        came.append(sequence)
        second.state = SequenceState.FINISHED
    assert came == [first]


def test_ended_sequences_do_not_accumulate() -> None:
    expiries = Expiries()
    for sequence in sequences(10_000):
        expiries.add(sequence, 1e9)
        sequence.state = SequenceState.FINISHED
    assert len(expiries._heap) < 200
