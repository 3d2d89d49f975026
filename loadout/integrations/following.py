"""Calls a function for every change of the catalog."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from loadout import types
from loadout.aio import AsyncClient
from loadout.errors import LoadoutError

logger = logging.getLogger(__name__)

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
CHANGES = frozenset({types.EventKind.REGISTERED, types.EventKind.UPDATED, types.EventKind.DELETED})


async def follow(
    client: AsyncClient, changed: Callable[[types.AdapterEvent | None], Awaitable[None]]
) -> None:
    """Calls `changed` with each change of a name, and with None when any may have changed: at the
    start, and after a failure. Never returns: a store that does not answer, or a change for which
    `changed` raises, is tried again after a second and longer."""
    delay_s = RETRY_SECONDS
    while True:
        try:
            revision = (await client.list_page(page_size=1)).revision
            await changed(None)
            delay_s = RETRY_SECONDS
            async with client.watch(revision) as events:
                async for event in events:
                    if event.kind in CHANGES:
                        await changed(event)
        except LoadoutError as error:
            logger.warning("changes of the store are followed again soon: %s", error)
        except Exception:  # whoever follows must not go on without the changes
            logger.exception("changes of the store are followed again soon")
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_RETRY_SECONDS)
