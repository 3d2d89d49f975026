"""The policy of the replicas: who gets which key, who is passed over, who comes back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadout._routing.metadata import Load
from loadout._routing.replicas import (
    BALANCE_FACTOR,
    LOAD_TTL_S,
    MAX_MISSED_PROBES,
    PROBE_S,
    SMALL_SHARE,
    Endpoint,
    Replicas,
    rank,
)
from tests.support.clock import Clock

KEYS = [f"default/a{number}" for number in range(300)]

addresses = st.lists(st.integers(1, 255), min_size=2, max_size=9, unique=True).map(
    lambda hosts: [f"10.0.0.{host}:7080" for host in hosts]
)
keys = st.lists(st.text(min_size=1), min_size=1, max_size=40)


def make(*names):
    clock = Clock()
    return Replicas([Endpoint(name) for name in names], clock, lambda: 0.5), clock


def home(replicas, key, **options):
    """Where a call goes that ends at once."""
    endpoint = replicas.acquire(key, **options)
    replicas.release(endpoint.address)
    return endpoint.address


@given(addresses, keys)
def test_only_the_keys_of_the_dead_one_move_and_they_come_back(names, keys):
    replicas, clock = make(*names)
    before = {key: home(replicas, key) for key in keys}
    dead = before[keys[0]]
    replicas.mark_failed(dead)
    for key in keys:
        expected = rank(names, key)[1] if before[key] == dead else before[key]
        assert home(replicas, key) == expected
    clock.now_s += PROBE_S
    assert dead in {endpoint.address for endpoint in replicas.pop_due()}
    replicas.record_probe(dead, is_healthy=True)
    assert {key: home(replicas, key) for key in keys} == before


@given(addresses, keys)
def test_the_order_in_which_replicas_are_given_does_not_matter(names, keys):
    forward, backward = make(*names)[0], make(*reversed(names))[0]
    assert [home(forward, key) for key in keys] == [home(backward, key) for key in keys]


def test_keys_are_spread_evenly():
    counts = Counter(rank(["a:1", "b:1", "c:1"], key)[0] for key in KEYS)
    assert len(counts) == 3
    assert min(counts.values()) > 75  # 100, less three standard deviations


@given(addresses, st.lists(st.sampled_from(KEYS[:3]), min_size=1, max_size=400))
def test_no_replica_has_more_than_its_share(names, calls):
    replicas, _ = make(*names)
    for number, key in enumerate(calls, 1):
        chosen = replicas.acquire(key).address
        [taken] = [each for each in replicas.statuses() if each.address == chosen]
        share = max(BALANCE_FACTOR * number / len(names), SMALL_SHARE * 64)
        assert taken.num_requests < share + 1
    assert sum(each.num_requests for each in replicas.statuses()) == len(calls)


def test_a_hot_adapter_spills_over_to_the_next_in_its_order():
    replicas, _ = make("a:1", "b:1", "c:1")
    first, second, third = rank(["a:1", "b:1", "c:1"], "hot")
    counts = Counter(replicas.acquire("hot").address for _ in range(90))
    assert counts[first] == pytest.approx(45, abs=1)
    assert counts[second] == pytest.approx(45, abs=1)
    cold = next(key for key in KEYS if rank(["a:1", "b:1", "c:1"], key)[0] == third)
    assert home(replicas, cold) == third, "others keep theirs"


def test_what_others_do_counts_as_published_until_it_is_old():
    replicas, clock = make("a:1", "b:1")
    first, second = rank(["a:1", "b:1"], "key")
    replicas.update_load(first, Load(40, 64))
    assert home(replicas, "key") == second
    assert home(replicas, "key", may_spill=False) == first
    clock.now_s += LOAD_TTL_S + 1
    assert home(replicas, "key") == first
    # Of 40 published ones, 35 are our own.
    for _ in range(35):
        replicas.acquire("key", avoid={second})
    replicas.update_load(first, Load(40, 64))
    for _ in range(35):
        replicas.release(first)
    assert {each.address: each.num_requests for each in replicas.statuses()} == {
        first: 5,
        second: 0,
    }


def test_a_share_is_of_what_a_replica_runs_at_once():
    replicas, _ = make("small:1", "large:1")
    replicas.update_load("small:1", Load(0, 8))
    replicas.update_load("large:1", Load(0, 128))
    key = next(key for key in KEYS if rank(["small:1", "large:1"], key)[0] == "small:1")
    counts = Counter(replicas.acquire(key).address for _ in range(100))
    assert counts["small:1"] < 12


def test_few_requests_are_no_reason_to_move():
    replicas, _ = make("a:1", "b:1", "c:1")
    assert len({replicas.acquire("key").address for _ in range(8)}) == 1


def test_the_base_model_goes_to_the_least_loaded():
    replicas, _ = make("a:1", "b:1", "c:1")
    replicas.update_load("a:1", Load(9, 64))
    replicas.update_load("b:1", Load(1, 4))
    assert home(replicas, "") == "c:1"
    counts = Counter(replicas.acquire("").address for _ in range(64))
    assert counts["c:1"] > counts["a:1"] > counts["b:1"]


def test_among_equals_the_base_model_goes_anywhere():
    endpoints = [Endpoint("a:1"), Endpoint("b:1"), Endpoint("c:1")]
    seen = {Replicas(endpoints).acquire("").address for _ in range(60)}
    assert seen == {"a:1", "b:1", "c:1"}


def test_those_to_avoid_and_those_out_are_asked_last():
    replicas, _ = make("a:1", "b:1", "c:1")
    first, second, third = rank(["a:1", "b:1", "c:1"], "key")
    assert home(replicas, "key", avoid={first}) == second
    replicas.mark_failed(second)
    assert home(replicas, "key", avoid={first}) == third
    assert replicas.has_other({first})
    assert not replicas.has_other({first, third})
    replicas.mark_failed(first)
    replicas.mark_failed(third)
    assert home(replicas, "key") == first, "somebody has to be asked"
    assert home(replicas, "key", avoid={first}) == second


def test_probes_are_due_once_at_a_time_and_not_where_there_is_no_choice():
    replicas, clock = make("a:1", "b:1")
    assert [endpoint.address for endpoint in replicas.pop_due()] == ["a:1", "b:1"]
    clock.now_s += 10 * PROBE_S
    assert replicas.pop_due() == [], "the last ones have not ended"
    replicas.record_probe("a:1", is_healthy=True, load=Load(3, 32))
    assert [endpoint.address for endpoint in replicas.pop_due()] == ["a:1"]
    assert replicas.statuses()[0].num_requests == 3
    assert make("a:1")[0].pop_due() == []


def test_an_old_probe_does_not_bring_back_one_that_has_failed_since():
    replicas, clock = make("a:1", "b:1")
    replicas.pop_due()
    clock.now_s += 0.1
    replicas.mark_failed("a:1")
    replicas.record_probe("a:1", is_healthy=True)
    assert not replicas.statuses()[0].is_healthy
    clock.now_s += PROBE_S
    assert "a:1" in {endpoint.address for endpoint in replicas.pop_due()}
    replicas.record_probe("a:1", is_healthy=True)
    assert replicas.statuses()[0].is_healthy
    replicas.record_probe("a:1", is_healthy=False)
    assert not replicas.statuses()[0].is_healthy


def test_a_replica_that_answers_late_once_keeps_its_keys():
    replicas, clock = make("a:1", "b:1")

    def miss():
        clock.now_s += PROBE_S
        assert "a:1" in {endpoint.address for endpoint in replicas.pop_due()}
        replicas.record_probe("a:1", is_healthy=None)
        return not replicas.statuses()[0].is_healthy

    assert [miss() for _ in range(MAX_MISSED_PROBES)] == [False] * (MAX_MISSED_PROBES - 1) + [True]
    clock.now_s += PROBE_S
    replicas.pop_due()
    replicas.record_probe("a:1", is_healthy=True)
    assert replicas.statuses()[0].is_healthy
    assert not miss(), "an answer in between: the count begins again"


def test_what_is_known_of_those_that_stay_is_kept():
    replicas, _ = make("a:1", "b:1")
    replicas.mark_failed("a:1")
    gone = replicas.acquire("key", avoid={"a:1"})
    replicas.replace([Endpoint("a:1"), Endpoint("c:1")])
    replicas.release(gone.address)
    replicas.update_load(gone.address, Load(1, 1))
    replicas.record_probe(gone.address, is_healthy=True)
    replicas.mark_failed(gone.address)
    assert [(each.address, each.is_healthy) for each in replicas.statuses()] == [
        ("a:1", False),
        ("c:1", True),
    ]
