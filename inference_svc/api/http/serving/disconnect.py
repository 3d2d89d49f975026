"""Cancels work whose client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, or raises its error. Raises ClientDisconnect if the client
    disconnects before; then, as when it is cancelled itself, it cancels the work and waits for its
    end.

    Nothing but the disconnect may be left to `receive`.
    """
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.wait((task, disconnect))
        if not task.cancelled():
            task.exception()  # retrieved, whether it is raised or comes too late


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
