"""The retry policy against a clock and chance of our own."""

from __future__ import annotations

import pytest

from loadout import errors
from loadout.retry import Attempts, RetryPolicy
from tests.support.clock import Clock


def attempts(timeout_s=None, chance=0.0, **policy):
    clock = Clock()
    return Attempts(RetryPolicy(**policy), timeout_s, clock, lambda: chance), clock


LOST = errors.StreamLost("gone", code="UNAVAILABLE")


def test_lost_streams_back_off_by_doubling_up_to_the_bound():
    tries, _ = attempts(max_attempts=6, first_backoff_s=0.1, max_backoff_s=0.5)
    delays = [tries.delay_s(LOST, repeatable=True) for _ in range(6)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5, None])


def test_jitter_cuts_at_most_half():
    tries, _ = attempts(chance=1.0, first_backoff_s=0.1)
    assert tries.delay_s(LOST, repeatable=True) == pytest.approx(0.05)


def test_lost_stream_of_an_unrepeatable_call_is_final():
    tries, _ = attempts()
    assert tries.delay_s(LOST, repeatable=False) is None


def test_retry_info_is_waited_for_even_if_unrepeatable():
    tries, _ = attempts()
    full = errors.ResourceExhausted("full", retry_after_s=1.5)
    assert tries.delay_s(full, repeatable=False) == pytest.approx(1.5)


def test_retry_info_jitter_never_comes_early():
    tries, _ = attempts(chance=1.0)
    full = errors.ResourceExhausted("full", retry_after_s=1.0)
    assert tries.delay_s(full, repeatable=True) == pytest.approx(1.1)


def test_retry_info_beyond_the_bound_is_final():
    tries, _ = attempts(max_retry_after_s=1.0)
    assert tries.delay_s(errors.ResourceExhausted("", retry_after_s=1.01), repeatable=True) is None


def test_exhausted_without_retry_info_is_final():
    tries, _ = attempts()
    assert tries.delay_s(errors.ResourceExhausted("too large"), repeatable=True) is None


def test_draining_service_is_left_for_its_successor():
    tries, _ = attempts(first_backoff_s=0.1)
    draining = errors.Unavailable("bye", reason="DRAINING")
    assert tries.delay_s(draining, repeatable=True) == pytest.approx(0.1)
    assert tries.delay_s(draining, repeatable=False) is None


def test_request_that_was_there_when_two_engines_ended_gets_no_third():
    tries, _ = attempts(first_backoff_s=0.1)
    failed = errors.Unavailable("the engine has ended", reason="ENGINE_FAILED")
    assert tries.delay_s(failed, repeatable=True) == pytest.approx(0.1)
    assert tries.delay_s(failed, repeatable=True) is None
    tries, _ = attempts(first_backoff_s=0.1)
    assert tries.delay_s(failed, repeatable=True, elsewhere=True) == 0.0
    assert tries.delay_s(failed, repeatable=False) is None


@pytest.mark.parametrize(
    "error",
    [
        errors.NotFound("x"),
        errors.InvalidArgument("x"),
        errors.ServerError("x"),
        errors.Unavailable("the service has already waited", reason="ADAPTER_UNAVAILABLE"),
        errors.DeadlineExceeded("x"),
        errors.Cancelled("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_answers_are_final(error):
    tries, _ = attempts()
    assert tries.delay_s(error, repeatable=True) is None


def test_no_wait_beyond_the_deadline():
    tries, clock = attempts(timeout_s=2.0)
    assert tries.remaining_s == pytest.approx(2.0)
    clock.now_s += 1.5
    full = errors.ResourceExhausted("full", retry_after_s=0.4)
    assert tries.delay_s(full, repeatable=True) == pytest.approx(0.4)
    clock.now_s += 0.4
    assert tries.delay_s(full, repeatable=True) is None


def test_remaining_is_never_negative():
    tries, clock = attempts(timeout_s=1.0)
    clock.now_s += 5
    assert tries.remaining_s == 0.0


def test_success_resets_the_count():
    tries, _ = attempts(max_attempts=2)
    assert tries.delay_s(LOST, repeatable=True) is not None
    tries.succeeded()
    assert tries.delay_s(LOST, repeatable=True) is not None
    assert tries.delay_s(LOST, repeatable=True) is None


def test_policy_needs_an_attempt():
    with pytest.raises(ValueError, match="max_attempts"):
        RetryPolicy(max_attempts=0)


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        errors.Unavailable("stopping", reason="DRAINING", retry_after_s=1.0),
        errors.ResourceExhausted("full", retry_after_s=3600.0),
    ],
)
def test_there_is_nothing_to_wait_for_elsewhere(error):
    tries, _ = attempts(max_attempts=3)
    assert [tries.delay_s(error, repeatable=True, elsewhere=True) for _ in range(3)] == [0, 0, None]


def test_elsewhere_makes_nothing_repeatable():
    tries, _ = attempts()
    assert tries.delay_s(LOST, repeatable=False, elsewhere=True) is None
    missing = errors.NotFound("no such adapter")
    assert tries.delay_s(missing, repeatable=True, elsewhere=True) is None
