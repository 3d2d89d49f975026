from __future__ import annotations

import threading
import time

import pytest

from adapter_store.errors import SourceUnavailable
from adapter_store.sources.staging import FetchLimits, Staging, Stop
from adapter_store.sources.transfer import CHANGED, Retry, RetryPolicy, copy_all
from servicekit.errors import Draining


class Waits(Staging):
    """A staging folder that notes waits instead of sleeping them."""

    def __init__(self, folder) -> None:
        super().__init__(folder, FetchLimits(1000, 1000))
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)


TROUBLE = SourceUnavailable("busy")


def test_waits_grow_to_a_limit_and_differ(tmp_path):
    policy = RetryPolicy(attempts=200, first_seconds=1, max_seconds=8)
    waits = Waits(tmp_path)
    retry = Retry(policy, waits)
    for _ in range(199):
        retry.failed(TROUBLE)
    for wait, longest in zip(waits.seconds, [1, 2, 4, *[8] * 196], strict=True):
        assert 0 <= wait <= longest
    late = waits.seconds[3:]
    assert max(late) > 6
    assert min(late) < 2, "no jitter: many stores would return in step"


def test_the_last_attempts_error_is_raised(tmp_path):
    waits = Waits(tmp_path)
    retry = Retry(RetryPolicy(attempts=3), waits)
    retry.failed(TROUBLE)
    retry.failed(TROUBLE)
    with pytest.raises(SourceUnavailable, match="busy"):
        retry.failed(TROUBLE)
    assert len(waits.seconds) == 2


def test_progress_resets_the_attempts(tmp_path):
    retry = Retry(RetryPolicy(attempts=2), Waits(tmp_path))
    for _ in range(10):
        retry.failed(TROUBLE)
        retry.progressed()


def test_what_has_changed_is_not_tried_again(tmp_path):
    waits = Waits(tmp_path)
    with pytest.raises(SourceUnavailable):
        Retry(RetryPolicy(), waits).failed(SourceUnavailable("changed", reason=CHANGED))
    assert waits.seconds == []


def test_requested_wait_is_limited(tmp_path):
    waits = Waits(tmp_path)
    policy = RetryPolicy(attempts=10, first_seconds=0.1, max_seconds=5)
    Retry(policy, waits).failed(TROUBLE, at_least_seconds=3)
    Retry(policy, waits).failed(TROUBLE, at_least_seconds=3600)
    assert waits.seconds == [3, 5]


def test_a_stopping_store_does_not_wait(tmp_path):
    stopping = threading.Event()
    staging = Staging(tmp_path, FetchLimits(1000, 1000), Stop(stopping))
    stopping.set()
    start = time.monotonic()
    with pytest.raises(Draining):
        Retry(RetryPolicy(first_seconds=600, max_seconds=600), staging).failed(TROUBLE, 600)
    assert time.monotonic() - start < 60


def test_the_first_failure_ends_what_others_write(tmp_path, make_staging):
    staging = make_staging()
    failing = threading.Event()
    writes = []

    def copy(name: str) -> None:
        if name == "b":
            failing.set()
            raise SourceUnavailable("b is broken")
        assert failing.wait(30)
        while True:  # ends with Abandoned
            staging.count(name, 0, 0)
            writes.append(name)

    with pytest.raises(SourceUnavailable, match="b is broken"):
        copy_all(["a", "b", "c"], copy, staging)
