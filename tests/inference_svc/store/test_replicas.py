"""The policy: even shares, keys move only when they must, failing replicas are ejected."""

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.store.replicas import (
    FIRST_BACKOFF_S,
    FORGET_S,
    MAX_BACKOFF_S,
    Endpoint,
    Replicas,
    rank,
)
from tests.support.clock import Clock

ADDRESSES = st.lists(
    st.from_regex(r"10\.0\.[0-9]{1,2}\.[0-9]{1,2}:7070", fullmatch=True),
    min_size=2,
    max_size=8,
    unique=True,
)
KEYS = [f"sha256:{number:064x}" for number in range(600)]


def make(*addresses: str) -> tuple[Replicas, Clock]:
    clock = Clock()
    return Replicas(map(Endpoint, addresses or ("a:1", "b:1", "c:1")), clock), clock


def order(replicas: Replicas, key: str = "key", avoid: tuple[str, ...] = ()) -> list[str]:
    return [endpoint.address for endpoint in replicas.order(key, avoid)]


@given(ADDRESSES)
def test_shares_are_even(addresses: list[str]) -> None:
    """Within five standard deviations of a fair draw."""
    shares = Counter(rank(addresses, key)[0] for key in KEYS)
    fair = 1 / len(addresses)
    spread = (len(KEYS) * fair * (1 - fair)) ** 0.5
    for address in addresses:
        assert abs(shares[address] - len(KEYS) * fair) < 5 * spread


@given(ADDRESSES, st.data())
def test_only_the_keys_of_a_removed_replica_move(addresses: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(addresses))
    replicas = Replicas(map(Endpoint, addresses))
    before = {key: order(replicas, key) for key in KEYS[:100]}
    left = [address for address in addresses if address != gone]
    replicas.replace(map(Endpoint, reversed(left)))
    for key, ranked in before.items():
        assert order(replicas, key) == [address for address in ranked if address != gone]
    replicas.replace(map(Endpoint, data.draw(st.permutations(addresses))))
    assert {key: order(replicas, key) for key in before} == before


@given(ADDRESSES, st.data())
def test_keys_of_an_ejected_replica_move_as_if_it_were_removed(
    addresses: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(addresses))
    clock = Clock()
    replicas = Replicas(map(Endpoint, addresses), clock)
    before = {key: order(replicas, key) for key in KEYS[:100]}
    replicas.report_failure(gone)
    for key, ranked in before.items():
        assert order(replicas, key) == [a for a in ranked if a != gone] + [gone]
    replicas.report_success(gone)
    assert {key: order(replicas, key) for key in before} == before


def test_the_order_is_the_same_in_every_process() -> None:
    """Pinned: services of two versions must agree on whose memory holds what."""
    assert rank(["a:1", "b:1", "c:1"], "sha256:00") == ["b:1", "a:1", "c:1"]


def test_avoided_replicas_come_last_for_this_caller_only() -> None:
    replicas, _ = make()
    first, second, third = order(replicas)
    assert order(replicas, avoid=(first,)) == [second, third, first]
    assert order(replicas, avoid=(first, second)) == [third, first, second]
    assert order(replicas, avoid=(first, second, third)) == [first, second, third]
    replicas.report_failure(third)
    assert order(replicas, avoid=(first,)) == [second, first, third], "ejected ones come last"
    assert order(replicas) == [first, second, third]


def test_backoff_doubles_to_its_limit_and_success_ends_it() -> None:
    replicas, clock = make()
    first, *others = order(replicas)
    backoffs = []
    for _ in range(7):
        replicas.report_failure(first)
        began_s = clock.now_s
        while order(replicas)[0] != first:
            clock.now_s += 0.125
        backoffs.append(clock.now_s - began_s)
    assert backoffs == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert (FIRST_BACKOFF_S, MAX_BACKOFF_S) == (0.5, 8.0)
    replicas.report_success(first)
    replicas.report_failure(first)
    clock.now_s += FIRST_BACKOFF_S
    assert order(replicas) == [first, *others]


def test_simultaneous_failures_count_once() -> None:
    """Eight pulls report the failure of their replica."""
    replicas, clock = make()
    first = order(replicas)[0]
    for _ in range(8):
        replicas.report_failure(first)
    clock.now_s += FIRST_BACKOFF_S
    assert order(replicas)[0] == first


def test_old_failures_are_forgotten() -> None:
    replicas, clock = make()
    first = order(replicas)[0]
    for _ in range(5):
        replicas.report_failure(first)
        clock.now_s += MAX_BACKOFF_S
    clock.now_s += FORGET_S
    replicas.report_failure(first)
    clock.now_s += FIRST_BACKOFF_S
    assert order(replicas)[0] == first


def test_probes_are_due_before_the_backoff_ends_and_one_at_a_time() -> None:
    replicas, clock = make("a:1", "b:1")
    assert replicas.pop_due() == []
    replicas.report_failure("a:1")
    assert replicas.pop_due() == []
    clock.now_s += FIRST_BACKOFF_S * 0.6
    assert replicas.pop_due() == [Endpoint("a:1")]
    assert replicas.pop_due() == [], "its probe is under way"
    replicas.report_probe("a:1", False)
    clock.now_s += FIRST_BACKOFF_S
    assert not replicas.statuses()[0].is_healthy, "a failed probe doubles the backoff"
    assert replicas.pop_due() == [Endpoint("a:1")]
    replicas.report_probe("a:1", True)
    assert replicas.statuses()[0].is_healthy
    replicas.report_failure("a:1")
    clock.now_s += 2 * FIRST_BACKOFF_S
    assert not replicas.statuses()[0].is_healthy, "a healthy probe does not reset the failures"


def test_reports_on_removed_replicas_are_ignored() -> None:
    replicas, _ = make("a:1", "b:1")
    replicas.report_failure("a:1")
    replicas.count_pull("b:1", "done", 10)
    replicas.replace([Endpoint("b:1", "store"), Endpoint("c:1", "store")])
    for report in (replicas.report_failure, replicas.report_success):
        report("a:1")
    replicas.report_probe("a:1", False)
    replicas.count_pull("a:1", "done", 10)
    assert replicas.endpoints == [Endpoint("b:1", "store"), Endpoint("c:1", "store")]
    (b, c) = replicas.statuses()
    assert (b.pulls, b.pulled_bytes, c.pulls) == ({"done": 1}, 10, {})


def test_counterparts_exchange_updates() -> None:
    """Updates pickle, and are not published again."""
    ours, clock = make("a:1", "b:1")
    theirs, _ = make("a:1", "b:1")
    published: list[str] = []

    def send(update: Any, on_update: Callable[[Any], None]) -> None:
        published.append(update[0])
        on_update(pickle.loads(pickle.dumps(update)))

    ours.publish_to(lambda update: send(update, theirs.on_update))
    theirs.publish_to(lambda update: send(update, ours.on_update))
    theirs.report_failure("a:1")
    theirs.report_failure("a:1")
    assert not ours.statuses()[0].is_healthy
    clock.now_s += FIRST_BACKOFF_S * 0.6
    assert ours.pop_due() == [Endpoint("a:1")], "pulling and probing processes share failures"
    ours.report_probe("a:1", True)
    assert theirs.statuses()[0].is_healthy
    theirs.report_success("a:1")
    theirs.report_success("a:1")
    theirs.count_pull("b:1", "done", 10)
    theirs.count_failover()
    ours.replace([Endpoint("b:1", "store")])
    assert ours.statuses() == theirs.statuses()
    assert ours.statuses()[0].pulls == {"done": 1}
    assert ours.num_failovers == 1
    assert published == ["eject", "admit", "recover", "count_pull", "count_failover", "replace"]


@pytest.mark.parametrize("key", ["", "x" * 1000, "\u00e9\n"])
def test_any_key_has_an_order(key: str) -> None:
    assert sorted(rank(["a:1", "b:1"], key)) == ["a:1", "b:1"]
