"""Waits for what others do in their own time: processes, threads, tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Long enough for a busy machine: a test that fails waits, one that passes does not."""
INTERVAL_S = 0.01


def until(condition: Callable[[], T], timeout_s: float = TIMEOUT_S, what: str = "") -> T:
    """Returns what `condition` returns once that is true; fails after `timeout_s`, with `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what or "nothing happened"
        time.sleep(INTERVAL_S)
    return found


async def until_async(condition: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """`until`, while other tasks go on."""
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):
            await asyncio.sleep(INTERVAL_S)
    return found
