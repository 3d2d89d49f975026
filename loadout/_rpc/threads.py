"""Blocking calls and threads for `Client`; `tasks` has the same names for `AsyncClient`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from typing import Any, ParamSpec, TypeVar

import grpc

from loadout.errors import LoadoutError
from loadout.security import ChannelFactory, ChannelOptions

T = TypeVar("T")
P = ParamSpec("P")

sleep = time.sleep


def run(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    return function(*arguments, **options)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions
) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def wait(future: Future[None] | None, timeout_s: float) -> None:
    """Returns when the future is done, or when that takes too long."""
    if future is not None:
        with contextlib.suppress(TimeoutError):
            future.result(timeout_s)


def is_done(future: Future[None] | None, timeout_s: float) -> bool:
    """Waits for it: a constructor may."""
    wait(future, timeout_s)
    return True


def read(rpc: Any) -> Any:
    """The next message of a response stream, None at its end."""
    return next(rpc, None)


def iterate(items: Iterator[T]) -> Iterator[T]:
    return items


def gather(functions: Sequence[Callable[[], T]]) -> list[T | LoadoutError]:
    """Runs all at the same time. Returns the result of each, or its LoadoutError."""
    return [each.result() for each in _start(functions)]


def first(functions: Sequence[Callable[[], T]]) -> list[T | LoadoutError]:
    """Runs all at the same time. Returns the outcomes up to the first success; the others go on."""
    outcomes: list[T | LoadoutError] = []
    for future in as_completed(_start(functions)):
        outcome = future.result()
        outcomes.append(outcome)
        if not isinstance(outcome, LoadoutError):
            break
    return outcomes


def _start(functions: Sequence[Callable[[], T]]) -> list[Future[T | LoadoutError]]:
    """Starts a daemon thread for each, because some may still run at the program's end."""
    futures: list[Future[T | LoadoutError]] = []
    for function in functions:
        future: Future[T | LoadoutError] = Future()
        futures.append(future)
        threading.Thread(target=_settle, args=(future, function), daemon=True).start()
    return futures


def _settle(future: Future[T | LoadoutError], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except LoadoutError as error:
        future.set_result(error)
    except BaseException as error:
        future.set_exception(error)


class Transport:
    """Opens channels, and makes calls in gRPC's threads that nobody waits for."""

    def __init__(self, factory: ChannelFactory | None) -> None:
        self.open_channel: ChannelFactory = factory or open_channel

    def call(
        self, method: Any, request: Any, timeout_s: float, done: Callable[[Any, Any, Any], None]
    ) -> None:
        """`done` gets the status code, the response (None: it failed) and the trailing metadata."""

        def finish(rpc: Any) -> None:
            code = rpc.code()
            response = rpc.result() if code is grpc.StatusCode.OK else None
            done(code, response, rpc.trailing_metadata())

        method.future(request, timeout=timeout_s).add_done_callback(finish)

    def close_channel(self, channel: Any) -> None:
        channel.close()

    def end(self) -> None:
        """Does nothing, because closing the channels ends running calls."""
