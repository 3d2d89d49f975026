"""A plugin of pytest, with which several processes share the tests of one run.

    GPU_TESTS_FOLDER=FOLDER python -m pytest -p bench.gpu_run.shared_tests tests/gpu

Each process takes the next test of a common order when it has nothing else to do. It appends the
events of its tests to `FOLDER/tests.jsonl`, and each failure to `FOLDER/failures.log`, at once, so
that processes that are killed leave both.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER_VARIABLE = "GPU_TESTS_FOLDER"
EVENTS, FAILURES, TAKEN = "tests.jsonl", "failures.log", "tests.taken"
LONGEST_FIRST = (
    "test_features_with_adapters_of_every_kind",
    "with_adapters_of_every_kind",
    "test_step.py",
    "test_out_of_memory.py",
    "test_a_row_of_a_step",
)
"""Parts of the names of tests by the time to compile their kernels on a cold cache: 65, 35, 20, 20
and 12 s on an H200's machine. All others take less than 10 s."""


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ[FOLDER_VARIABLE])
    config.pluginmanager.register(SharedTests(folder), "shared_tests")


def in_order(names: list[str]) -> list[int]:
    """Returns the indices of tests in the order in which to run them: the longest first, and tests
    of the same feature apart, because processes that run them at once compile the same kernels."""
    num_alike: Counter[tuple[int, str]] = Counter()
    keys = []
    for index, name in enumerate(names):
        length = next((n for n, part in enumerate(LONGEST_FIRST) if part in name), len(names))
        feature = name.partition("-")[0]
        keys.append((length, num_alike[length, feature], index))
        num_alike[length, feature] += 1
    return [index for _, _, index in sorted(keys)]


class SharedTests:
    """Runs the tests that this process takes, and writes their events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replaces pytest's loop. Every fixture ends with its test, because nobody knows which
        test the process takes next."""
        names = [item.nodeid for item in session.items]
        self._write("collected", names=names)
        order = in_order(names)
        for place in self._take(len(order)):
            item = session.items[order[place]]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", name=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = f"==== {report.nodeid}, {report.when}\n{report.longreprtext}\n"
            self._append(FAILURES, text)
        facts = {"outcome": report.outcome, "seconds": report.duration}
        self._write(report.when, name=report.nodeid, **facts)

    def _take(self, number: int) -> Iterator[int]:
        """Yields places in the order, each to one process only."""
        while True:
            with (self._folder / TAKEN).open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                place = int(file.read() or 0)
                if place >= number:
                    return
                file.truncate(0)
                file.write(str(place + 1))
            yield place

    def _write(self, event: str, **facts: Any) -> None:
        self._append(EVENTS, json.dumps({"event": event, **facts}) + "\n")

    def _append(self, name: str, text: str) -> None:
        """Appends in one call, so that lines of several processes do not mix."""
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
