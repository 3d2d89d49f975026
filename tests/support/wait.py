"""Waits for what others do in their own time: processes, threads, tasks."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Long enough for a busy machine: a test that fails waits, one that passes does not."""
INTERVAL_S = 0.01


def until(
    condition: Callable[[], T],
    timeout_s: float = TIMEOUT_S,
    what: str | Callable[[], str] = "nothing happened",
) -> T:
    """Returns what `condition` returns once that is true; fails after `timeout_s`, with `what` or
    with what that returns then."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what if isinstance(what, str) else what()
        time.sleep(INTERVAL_S)
    return found


async def until_async(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Waits as `until` does, while other tasks go on; `condition` may be a coroutine function."""
    async with asyncio.timeout(timeout_s):
        while not await _value(condition()):
            await asyncio.sleep(INTERVAL_S)


async def _value(found: object) -> object:
    return await found if inspect.isawaitable(found) else found
