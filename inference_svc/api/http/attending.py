"""Work for a client is done as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def attend(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Raises ClientDisconnect if the client leaves before, and
    then, as when it is cancelled itself, has cancelled the work and waited for its end.

    Nothing of the request may be left to `receive`.
    """
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_leave(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.wait((task, leaving))
        if not task.cancelled():
            task.exception()  # seen, whether it is raised or comes too late


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
