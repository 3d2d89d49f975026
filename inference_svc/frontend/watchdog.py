"""Checks that the engine still answers: a process that hangs is not one that has died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from servicekit.errors import ServiceError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
HANG_SECONDS = 120.0
"""Longer than any step that callers would wait for, also of a large model without a GPU."""


async def watch_engine(
    check: Callable[[], Awaitable[object]], on_change: Callable[[bool], Awaitable[None]]
) -> None:
    """Calls `check` every CHECK_SECONDS until it raises ServiceError: the engine has failed.
    Calls `on_change` with False once a check has taken HANG_SECONDS, and with True when it ends."""
    while True:
        checking = asyncio.ensure_future(check())
        try:
            if not (await asyncio.wait({checking}, timeout=HANG_SECONDS))[0]:
                logger.error("the engine does not answer", extra={"seconds": HANG_SECONDS})
                await on_change(False)
                await checking
                logger.warning("the engine answers again")
                await on_change(True)
            await checking
        except ServiceError:
            return
        finally:
            checking.cancel()
        await asyncio.sleep(CHECK_SECONDS)
