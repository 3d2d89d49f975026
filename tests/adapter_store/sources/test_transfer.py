from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from adapter_store.errors import SourceUnavailable
from adapter_store.sources.limits import Abandoned, FetchLimits, Stop
from adapter_store.sources.staging import StagedFile, Staging
from adapter_store.sources.transfer import (
    CHANGED,
    TOO_SLOW,
    FetchRunner,
    Retry,
    RetryPolicy,
    copy_all,
)
from servicekit.errors import Draining, ShareExceeded
from servicekit.pace import Pace
from tests.support.machine.limits import no_more_threads
from tests.support.wait import TIMEOUT_S, until


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


STALL_S = 0.2


@pytest.fixture
def runner() -> FetchRunner:
    return FetchRunner(Pace(1 << 20, STALL_S), 1, max_fetches=2)


def test_a_fetch_without_a_thread_leaves_its_place(runner, staging):
    for _ in range(3):
        with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
            runner.run("a", lambda: "", staging)
    assert runner.running.used == 0
    assert runner.run("a", lambda: "done", staging) == "done"


def test_a_slow_disk_is_no_slow_source(runner, staging):
    """Writing, hashing and syncing takes longer than the source may be silent."""

    def fetch() -> str:
        with staging.work.local(), staging.work.local():
            time.sleep(2 * STALL_S)
        return "done"

    assert runner.run("a", fetch, staging) == "done"
    assert staging.work.local_seconds >= 2 * STALL_S


def test_what_files_take_is_local_work(staging, monkeypatch):
    sync = os.fsync

    def slow_sync(fd: int) -> None:
        time.sleep(STALL_S)
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow_sync)
    with staging.create("adapter_config.json") as file:
        file.write(b"{}")
    staging.work.wait_durable()
    assert staging.work.local_seconds >= STALL_S


def test_fetches_that_were_left_count_until_they_end(runner, make_staging):
    over = threading.Event()

    def fetch() -> str:
        over.wait(TIMEOUT_S)
        return ""

    for _ in range(2):
        with pytest.raises(SourceUnavailable) as raised:
            runner.run("a", fetch, make_staging())
        assert raised.value.reason == TOO_SLOW
    with pytest.raises(ShareExceeded, match="fetches: 2 of 2"):
        runner.run("a", fetch, make_staging())
    over.set()
    until(lambda: runner.running.used == 0)


def test_a_fetch_that_was_left_creates_no_file(staging, monkeypatch):
    """Not even if it was about to when its folder was removed."""
    opening, go_on = threading.Event(), threading.Event()
    begin = StagedFile.__init__

    def slowly(self: StagedFile, staging: Staging, path: Path) -> None:
        opening.set()
        assert go_on.wait(TIMEOUT_S)
        begin(self, staging, path)

    monkeypatch.setattr(StagedFile, "__init__", slowly)
    late = threading.Thread(target=lambda: staging.create("adapter_config.json").suspend())
    late.start()
    assert opening.wait(TIMEOUT_S)
    removing = threading.Thread(target=staging.remove)
    removing.start()
    go_on.set()
    for thread in (late, removing):
        thread.join(TIMEOUT_S)
    assert not staging.folder.exists()
    with pytest.raises(Abandoned):
        staging.create("adapter_model.safetensors")
