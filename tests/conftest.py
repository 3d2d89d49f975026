"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support import processes

PROCESS_FIXTURES = {"postgres", "catalog_dsn", "s3_endpoint", "interpreter", "compiler"}
"""Fixtures that start processes: a test that requests one bears the mark `processes` by that."""
PROCESS_FOLDERS = ("tests/system/", "tests/soak/", "tests/loadout/demo/")


def pytest_configure() -> None:
    processes.install()
    # A job in the background ignores SIGINT, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        starts = item.nodeid.startswith(PROCESS_FOLDERS) or "postgres" in item.nodeid
        if starts or not PROCESS_FIXTURES.isdisjoint(fixtures):
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from processes.hold(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from processes.hold(item))
