"""Adds durations to each test's report: a property for each phase, one for each fixture that was
set up for it, and one for the processor's time. JUnit's file has these properties, and the report
of the whole run has the processor's time of forks; `tools.durations` reads both."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

FIXTURE = "fixture "
"""The prefix of a fixture's property; a phase's property has the phase's name."""
PROCESSOR = "processor"
"""The property with the processor's time of the worker, and of programs that it started and that
have ended."""
FORKS = "forks "
"""The prefix of a property of the run: the processor's time of forks that a test's setup or call
has started, by the test's name. See `tests.support.forks`."""
SHORTEST_S = 0.005
"""Shorter times are left out, so that the report of 14,000 tests stays small."""


class Durations:
    """A plugin of each worker; properties travel to the controller with the reports."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None
        self._processor_s = _processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._item = item
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Without the fixtures that this one asks for: pytest sets them up before."""
        start_s = time.perf_counter()
        try:
            return (yield)
        finally:
            self._add(f"{FIXTURE}{fixturedef.argname}", time.perf_counter() - start_s)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        self._add(call.when, call.duration)
        before_s, self._processor_s = self._processor_s, _processor_s()
        self._add(PROCESSOR, self._processor_s - before_s)

    def _add(self, name: str, seconds: float) -> None:
        if self._item is not None and seconds >= SHORTEST_S:
            self._item.user_properties.append((name, round(seconds, 3)))


def _processor_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in usages)
