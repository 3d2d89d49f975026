"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import processes

PROCESS_FIXTURES = {"postgres", "catalog_dsn", "s3_endpoint", "interpreter", "compiler"}
"""Fixtures that start processes: a test that requests one bears the mark `processes` by that."""
PROCESS_FOLDERS = ("tests/system/", "tests/soak/", "tests/loadout/demo/")


def pytest_configure() -> None:
    processes.install()


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
