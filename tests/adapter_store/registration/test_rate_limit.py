from __future__ import annotations

import pytest

from adapter_store.registration import rate_limit as rates_module
from adapter_store.registration.rate_limit import Rates
from servicekit.errors import QuotaExceeded
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rates(clock) -> Rates:
    return Rates(clock)


def num_granted(rates: Rates, tenant: str, per_minute: int, tries: int) -> int:
    granted = 0
    for _ in range(tries):
        try:
            rates.take(tenant, per_minute)
        except QuotaExceeded:
            continue
        granted += 1
    return granted


@pytest.mark.parametrize("per_minute", [1, 7, 60, 6000])
def test_a_minutes_worth_at_once_and_then_the_rate(rates, clock, per_minute):
    assert num_granted(rates, "t", per_minute, per_minute + 5) == per_minute
    clock.now_s += 60 / per_minute
    assert num_granted(rates, "t", per_minute, 3) == 1
    clock.now_s += 30
    assert num_granted(rates, "t", per_minute, per_minute) == per_minute // 2
    clock.now_s += 3600
    assert num_granted(rates, "t", per_minute, per_minute + 5) == per_minute


def test_who_waits_as_told_is_granted(rates, clock):
    assert num_granted(rates, "t", 7, 7) == 7
    for _ in range(50):
        with pytest.raises(QuotaExceeded, match="registrations_per_minute: tenant 't'") as caught:
            rates.take("t", 7)
        assert caught.value.subject == "registrations_per_minute"
        assert 0 < caught.value.retry_after_s < 60 / 7 + 1e-6
        clock.now_s += caught.value.retry_after_s
        rates.take("t", 7)


def test_tenants_do_not_share(rates):
    assert num_granted(rates, "a", 2, 5) == 2
    assert num_granted(rates, "b", 2, 5) == 2


def test_no_rate_grants_all(rates):
    for _ in range(1000):
        rates.take("t", None)


def test_a_lower_rate_counts_from_what_was_taken(rates, clock):
    assert num_granted(rates, "t", 60, 30) == 30
    assert num_granted(rates, "t", 2, 5) == 1
    clock.now_s += 60
    assert num_granted(rates, "t", 2, 5) == 2


def test_tenants_that_are_silent_are_forgotten(rates, clock, monkeypatch):
    monkeypatch.setattr(rates_module, "_MAX_TENANTS", 10)
    for i in range(100):
        rates.take(f"t{i}", 60)
        clock.now_s += 1
    assert len(rates._full_at) <= 10
