"""What holds for every test."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support import processes

PROCESS_FIXTURES = {"postgres", "catalog_dsn", "s3_endpoint", "interpreter", "compiler"}
"""Fixtures that start processes: a test that requests one bears the mark `processes` by that."""
PROCESS_FOLDERS = ("tests/system/", "tests/soak/", "tests/loadout/demo/", "tests/gpu/")
"""On a GPU Triton starts an assembler."""


def pytest_configure() -> None:
    processes.install()
    # Until all is imported: nothing of it is garbage, and looking for some is half of the time.
    gc.disable()
    # A job in the background ignores SIGINT, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        starts = item.nodeid.startswith(PROCESS_FOLDERS) or "postgres" in item.nodeid
        if starts or not PROCESS_FIXTURES.isdisjoint(fixtures):
            item.add_marker(pytest.mark.processes)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # A worker has one core, and OpenMP's threads spin while they wait for each other: beside a busy
    # core two were ten times slower than one. Tests of several threads ask for them.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from processes.hold(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from processes.hold(item))
