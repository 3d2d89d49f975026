"""Asyncio tasks for `AsyncClient`; `threads` has the same names for `Client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
import grpc.aio

from loadout.errors import LoadoutError
from loadout.security import ChannelFactory, ChannelOptions

T = TypeVar("T")

sleep = asyncio.sleep
run = asyncio.to_thread


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def wait(future: Future[None] | None, timeout_s: float) -> None:
    """Returns when the future is done, or when that takes too long."""
    if future is not None and not future.done():
        await asyncio.wait([asyncio.wrap_future(future)], timeout=timeout_s)


def is_done(future: Future[None] | None, timeout_s: float) -> bool:
    """Returns at once: a constructor cannot await."""
    return future is None or future.done()


async def read(rpc: Any) -> Any:
    """The next message of a response stream, None at its end, or once another task closed it."""
    try:
        message = await rpc.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None
    return None if message is grpc.aio.EOF else message


async def iterate(items: Iterator[T]) -> AsyncIterator[T]:
    """Takes the items in a worker thread: they may come from a slow disk."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item


async def gather(functions: Sequence[Callable[[], Awaitable[T]]]) -> list[T | LoadoutError]:
    """Runs all at the same time. Returns the result of each, or its LoadoutError."""
    return await asyncio.gather(*(_outcome(function) for function in functions))


async def first(functions: Sequence[Callable[[], Awaitable[T]]]) -> list[T | LoadoutError]:
    """Runs all at the same time. Returns the outcomes up to the first success; the others go on."""
    outcomes: list[T | LoadoutError] = []
    pending = {asyncio.create_task(_outcome(function)) for function in functions}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            outcomes += [task.result() for task in done]
            if any(not isinstance(each, LoadoutError) for each in outcomes):
                break
    finally:
        for task in pending:
            _LEFT.add(task)
            task.add_done_callback(_LEFT.discard)
    return outcomes


_LEFT: set[asyncio.Task[Any]] = set()
"""Tasks that nobody waits for; the loop itself holds tasks weakly."""


async def _outcome(function: Callable[[], Awaitable[T]]) -> T | LoadoutError:
    try:
        return await function()
    except LoadoutError as error:
        return error


class Transport:
    """Opens channels, and makes calls on one event loop that nobody waits for."""

    def __init__(self, factory: ChannelFactory | None) -> None:
        self.open_channel: ChannelFactory = factory or open_channel
        self._tasks: set[asyncio.Task[None]] = set()

    def call(
        self, method: Any, request: Any, timeout_s: float, done: Callable[[Any, Any, Any], None]
    ) -> None:
        """`done` gets the status code, the response (None: it failed) and the trailing metadata."""

        async def call() -> None:
            rpc = method(request, timeout=timeout_s)
            try:
                response = await rpc
            except grpc.RpcError as error:
                done(error.code(), None, error.trailing_metadata())
            else:
                done(grpc.StatusCode.OK, response, await rpc.trailing_metadata())

        self._start(call())

    def close_channel(self, channel: Any) -> None:
        self._start(channel.close())

    async def end(self) -> None:
        """Cancels running tasks, which would outlive the loop."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # The loop itself holds tasks weakly.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
