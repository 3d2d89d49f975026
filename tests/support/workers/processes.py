"""Marks tests that start processes, and stops all others from doing so.

`make test-unit` runs what bears none of the marks `processes`, `slow` and `long`. So that the mark
stays true, a test without it fails where it starts a process, in its fixtures too.
"""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""Audit events (https://docs.python.org/3/library/audit_events.html) of a process that begins."""


class Guard:
    """Knows whether the test that runs may start processes."""

    def __init__(self) -> None:
        self.is_open = True

    def check(self, event: str) -> None:
        """Raises RuntimeError where the running test may not start a process."""
        if not self.is_open:
            raise RuntimeError(
                f"{event}: this test starts a process; mark it with @pytest.mark.processes, "
                "or its module with pytestmark"
            )


GUARD = Guard()


def install() -> None:
    """Watches this process from now on. An audit hook cannot be taken away again."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            GUARD.check(event)

    sys.addaudithook(watch)
    start: Callable[[Any], None] = multiprocessing.process.BaseProcess.start

    def watched_start(self: Any) -> None:
        GUARD.check("multiprocessing")
        start(self)

    # A process that is spawned raises no audit event.
    multiprocessing.process.BaseProcess.start = watched_start  # type: ignore[method-assign]


def hold(item: pytest.Item) -> Iterator[None]:
    """Holds `item` to its mark, while a hook runs. Not at its tear-down: what the session shares
    ends with whichever test is the last."""
    GUARD.is_open = item.get_closest_marker("processes") is not None
    try:
        return (yield)
    finally:
        GUARD.is_open = True
