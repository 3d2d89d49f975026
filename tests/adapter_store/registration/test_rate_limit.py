from __future__ import annotations

import pytest

from adapter_store.registration import rate_limit as limiter_module
from adapter_store.registration.rate_limit import RateLimiter
from servicekit.errors import QuotaExceeded
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock) -> RateLimiter:
    return RateLimiter(clock)


def num_granted(limiter: RateLimiter, tenant: str, per_minute: int, tries: int) -> int:
    granted = 0
    for _ in range(tries):
        try:
            limiter.acquire(tenant, per_minute)
        except QuotaExceeded:
            continue
        granted += 1
    return granted


@pytest.mark.parametrize("per_minute", [1, 7, 60, 6000])
def test_a_minutes_worth_at_once_and_then_the_rate(limiter, clock, per_minute):
    assert num_granted(limiter, "t", per_minute, per_minute + 5) == per_minute
    clock.now_s += 60 / per_minute
    assert num_granted(limiter, "t", per_minute, 3) == 1
    clock.now_s += 30
    assert num_granted(limiter, "t", per_minute, per_minute) == per_minute // 2
    clock.now_s += 3600
    assert num_granted(limiter, "t", per_minute, per_minute + 5) == per_minute


def test_retry_time_is_sufficient(limiter, clock):
    assert num_granted(limiter, "t", 7, 7) == 7
    for _ in range(50):
        with pytest.raises(QuotaExceeded, match="registrations_per_minute: tenant 't'") as caught:
            limiter.acquire("t", 7)
        assert caught.value.subject == "registrations_per_minute"
        assert 0 < caught.value.retry_after_s < 60 / 7 + 1e-6
        clock.now_s += caught.value.retry_after_s
        limiter.acquire("t", 7)


def test_tenants_do_not_share(limiter):
    assert num_granted(limiter, "a", 2, 5) == 2
    assert num_granted(limiter, "b", 2, 5) == 2


def test_no_rate_grants_all(limiter):
    for _ in range(1000):
        limiter.acquire("t", None)


def test_lower_rate_counts_earlier_registrations(limiter, clock):
    assert num_granted(limiter, "t", 60, 30) == 30
    assert num_granted(limiter, "t", 2, 5) == 1
    clock.now_s += 60
    assert num_granted(limiter, "t", 2, 5) == 2


def test_tenants_that_are_silent_are_forgotten(limiter, clock, monkeypatch):
    monkeypatch.setattr(limiter_module, "_MAX_TENANTS", 10)
    for i in range(100):
        limiter.acquire(f"t{i}", 60)
        clock.now_s += 1
    assert len(limiter._full_at) <= 10
