"""Whether the engine still takes turns: a process that hangs is none that has died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from servicekit.errors import ServiceError

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0
HANG_SECONDS = 120.0
"""More than the longest step that anybody would wait for, also of a large model without a GPU."""


async def follow_engine(
    ask: Callable[[], Awaitable[object]], on_change: Callable[[bool], Awaitable[None]]
) -> None:
    """Calls `ask` now and then until it raises ServiceError: the engine has failed. `on_change`
    hears False once an answer has not come for HANG_SECONDS, and True when it has."""
    while True:
        asked = asyncio.ensure_future(ask())
        try:
            if not (await asyncio.wait({asked}, timeout=HANG_SECONDS))[0]:
                log.error("the engine does not answer", extra={"seconds": HANG_SECONDS})
                await on_change(False)
                await asked
                log.warning("the engine answers again")
                await on_change(True)
            await asked
        except ServiceError:
            return
        finally:
            asked.cancel()
        await asyncio.sleep(ASK_SECONDS)
