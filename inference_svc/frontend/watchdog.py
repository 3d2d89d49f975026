"""Checks that the engine still answers, because a process may hang without dying."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
HANG_SECONDS = 120.0
"""Longer than any step that callers would wait for, also of a large model without a GPU."""
CONFIRM_SECONDS = 5.0
"""An engine that is to be ended gets at least so long after it was first found to hang: a machine
that was suspended finds out late, and answers at once."""


async def watch_engine(
    check: Callable[[], Awaitable[object]],
    on_change: Callable[[bool], Awaitable[None]],
    on_hung: Callable[[], None],
    step_timeout_s: float = 0.0,
) -> None:
    """Calls `check` every CHECK_SECONDS until it raises ServiceError: the engine has failed.

    Calls `on_change` with False once a check has taken HANG_SECONDS, and with True when it ends;
    `on_hung`, as the last, when it has taken `step_timeout_s`; 0: never.
    """
    first_s = min(HANG_SECONDS, step_timeout_s or HANG_SECONDS)
    second_s = max(CONFIRM_SECONDS, step_timeout_s - first_s) if step_timeout_s else None
    while True:
        checking = asyncio.ensure_future(check())
        try:
            if not await _ends(checking, first_s):
                logger.error("the engine does not answer", extra={"seconds": first_s})
                await on_change(False)
                if not await _ends(checking, second_s):
                    on_hung()
                    return
                await checking
                logger.warning("the engine answers again")
                await on_change(True)
            await checking
        except ServiceError:
            return
        finally:
            checking.cancel()
        await asyncio.sleep(CHECK_SECONDS)


async def _ends(checking: asyncio.Future[object], timeout_s: float | None) -> bool:
    return bool((await asyncio.wait({checking}, timeout=timeout_s))[0])
