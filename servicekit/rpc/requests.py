"""Requests within bounds: how large a message of each method may be, how much its fields may hold,
and how many may be arriving at once.

gRPC reads the one message of a unary method before its handler runs, and holds it until the handler
has ended. So here every method is served as a stream, of which nothing is read before it is asked
for: a message is read once its caller is known, and nobody but the handler holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message

from servicekit.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from servicekit.rpc.wire import Counter, Malformed, TooMany

SMALL_BYTES = 64 << 10
"""Holds every message whose fields are names, numbers and labels."""
INLINE_ENTRIES = 1024
"""Larger messages that may have more entries are parsed off the event loop, one at a time: they
would hold up all other calls."""
ARRIVAL_SECONDS = 30.0
"""How long a message may take to arrive; one of a stream comes when its caller has it."""
MAX_ARRIVING = 8
"""Messages of one caller that arrive at once. Each may be as large as the server's largest; further
ones wait unread."""


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What one request message may hold. `max_items` of repeated fields and maps, `max_chars` of
    texts, each by its path, such as "layout.targets". Of a caller's calls only `max_running` are
    read and run at once, if that is not 0; further ones wait unread."""

    message: type[Message]
    max_bytes: int = SMALL_BYTES
    max_items: Mapping[str, int] = field(default_factory=dict)
    max_chars: Mapping[str, int] = field(default_factory=dict)
    max_running: int = 0
    _counter: Counter = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counter = Counter(self.message, self.max_items)
        object.__setattr__(self, "_counter", counter)

    def check_size(self, raw: bytes) -> None:
        """Raises ResourceExhausted for a message that is too large."""
        if len(raw) > self.max_bytes:
            raise ResourceExhausted(
                f"the request has {len(raw)} bytes; at most {self.max_bytes} are read",
                subject="request",
                reason="REQUEST_TOO_LARGE",
            )

    def parse(self, raw: bytes) -> Any:
        """Returns the message without the fields that are not known here.

        Raises ResourceExhausted for one that is too large and InvalidArgument for one that is none,
        or naming the field that holds too much; either before it is parsed, which takes a second
        for a few MiB of empty entries and stops all other threads meanwhile.
        """
        self.check_size(raw)
        try:
            self._counter.check(raw)
            message = self.message.FromString(raw)
        except TooMany as error:
            raise InvalidArgument(
                f"{error.path}: more than {error.limit} entries", subject=error.path
            ) from None
        except (Malformed, DecodeError):
            raise InvalidArgument(
                f"the request is not a {self.message.DESCRIPTOR.name}",
                subject="request",
                reason="MALFORMED_REQUEST",
            ) from None
        message.DiscardUnknownFields()
        # Packed numbers are counted here: before, only the bytes that they may take.
        for limits, what in ((self.max_items, "entries"), (self.max_chars, "characters")):
            for path, limit in limits.items():
                size = len(attrgetter(path)(message))
                if size > limit:
                    raise InvalidArgument(
                        f"{path}: {size} {what} are more than {limit}", subject=path
                    )
        return message


RequestTable: TypeAlias = Mapping[str, RequestBounds]
"""The bounds of each method of a service, by its name."""


def largest_request(table: RequestTable) -> int:
    """Returns the size in bytes of the largest message that any method reads."""
    return max(bounds.max_bytes for bounds in table.values())


CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Whose share of the places the call in progress takes: the name of its token, "" without one."""


class RequestReader:
    """Reads requests; each caller has MAX_ARRIVING places for those that are arriving."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[asyncio.Semaphore, int]] = {}
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="parse")

    async def read(self, requests: AsyncIterator[bytes], bounds: RequestBounds) -> Any:
        """Returns the only message of a call. Raises as RequestBounds.parse, and DeadlineExceeded
        if it does not arrive in time."""
        try:
            async with asyncio.timeout(ARRIVAL_SECONDS), self._place("", MAX_ARRIVING):
                raw = await anext(aiter(requests), None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request has not arrived within {ARRIVAL_SECONDS:g} seconds",
                subject="request",
                reason="REQUEST_TOO_SLOW",
            ) from None
        if raw is None:
            raise InvalidArgument("the call has no request", subject="request")
        return await self._parse(raw, bounds)

    async def read_stream(
        self, requests: AsyncIterator[bytes], bounds: RequestBounds
    ) -> AsyncGenerator[Any]:
        """Yields the messages of a stream, each read when it is asked for. Raises as
        RequestBounds.parse."""
        async for raw in requests:
            yield await self._parse(raw, bounds)

    @asynccontextmanager
    async def turn(self, method: str, bounds: RequestBounds) -> AsyncIterator[None]:
        """Waits until fewer than `max_running` of the caller's calls of this method run."""
        if bounds.max_running == 0:
            yield
            return
        async with self._place(method, bounds.max_running):
            yield

    @asynccontextmanager
    async def _place(self, kind: str, num_places: int) -> AsyncIterator[None]:
        key = f"{CALLER.get()} {kind}"
        semaphore, num_users = self._places.get(key) or (asyncio.Semaphore(num_places), 0)
        self._places[key] = semaphore, num_users + 1
        try:
            async with semaphore:
                yield
        finally:
            num_users = self._places[key][1] - 1
            if num_users:
                self._places[key] = semaphore, num_users
            else:
                del self._places[key]

    async def _parse(self, raw: bytes, bounds: RequestBounds) -> Any:
        bounds.check_size(raw)
        if len(raw) <= SMALL_BYTES or sum(bounds.max_items.values()) <= INLINE_ENTRIES:
            return bounds.parse(raw)
        return await asyncio.get_running_loop().run_in_executor(self._parser, bounds.parse, raw)
