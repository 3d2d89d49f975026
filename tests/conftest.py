"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import processes

START_PROCESSES = {"postgres", "catalog_dsn", "s3_endpoint"}
"""Fixtures that start processes: who asks for one bears the mark by that."""


def pytest_configure() -> None:
    processes.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not START_PROCESSES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    return (yield from processes.hold(item))
