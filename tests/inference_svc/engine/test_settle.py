"""The times between tokens: of a whole batch at once, and of those that had to wait."""

from __future__ import annotations

from inference_svc.engine.policy.settle import Settler
from tests.inference_svc.engine.server import Server


def gaps(settler: Settler) -> tuple[int, float]:
    """How many there were, and their sum."""
    state = settler.token_gaps.state
    return sum(state.counts), state.sum_seconds


def steps(server: Server, *seconds: float) -> None:
    """A step after each of these."""
    for each in seconds:
        server.now_s += each
        server.step()


def test_gap_is_between_two_tokens_of_a_sequence() -> None:
    server = Server()
    for _ in range(2):
        server.submit(max_tokens=4)
    steps(server, 1.0)
    assert gaps(server.settler) == (0, 0.0), "first tokens follow none"
    steps(server, 0.5, 0.25, 2.0)
    assert gaps(server.settler) == (6, 2 * 2.75)
    assert server.settler.num_sampled == 8


def test_gap_includes_skipped_steps() -> None:
    server = Server()
    patient, other = server.submit(max_tokens=9), server.submit(max_tokens=9)
    steps(server, 1.0, 1.0)
    assert gaps(server.settler) == (2, 2.0)
    server.scheduler.preempt(patient, server.now_s)
    server.scheduler.limits = type(server.scheduler.limits)(1, 64, 64)
    steps(server, 1.0, 1.0)
    assert gaps(server.settler) == (4, 4.0), "the other one's"
    assert patient.num_output == 2
    server.scheduler.limits = type(server.scheduler.limits)(2, 64, 64)
    steps(server, 1.0)
    assert patient.num_output == 3
    assert gaps(server.settler) == (6, 5.0 + 3.0)
    assert other.num_output == 5
