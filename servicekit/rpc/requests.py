"""Requests within bounds: how large a message of each method may be, how much its fields may hold,
and whose share of the memory it takes.

gRPC reads the one message of a unary method before its handler runs, and holds it until the handler
has ended. So here every method is served as a stream, of which nothing is read before it is asked
for: a message is read once its caller is known and has a place for it, and nobody but the handler
holds it. It is asked for by the context's `read`: the iterator that handlers of streams get refers
to itself and to the last message, which then lives on until a collection of cycles finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from servicekit.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from servicekit.rpc.places import CALL_BYTES, CALLER, CallPlaces, wait_for
from servicekit.rpc.wire import Counter, Malformed, TooMany
from servicekit.shares import Reservation

SMALL_BYTES = 64 << 10
"""Holds every message whose fields are names, numbers and labels."""
INLINE_ENTRIES = 1024
"""Messages with more are parsed off the event loop: they would hold up all other calls."""
READ_BYTES_PER_SECOND = 200 << 20
"""The approximate rate at which one processor reads large messages."""
ARRIVAL_SECONDS = 30.0
"""How long a message may take to arrive; one of a stream comes when its caller has it."""


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The limits of a call of a method. `max_items` of repeated fields and maps, `max_chars` of
    texts, each by its path, such as "layout.targets". `answer_bytes` is the most memory that its
    answers take until they are sent: twice the largest, which gRPC copies. Of all calls of the
    method only `max_running` are read and run at once, if that is not 0; further ones wait unread.
    `read_direct` reads messages of one form at once, in no time, and returns None for others."""

    message: type[Message]
    max_bytes: int = SMALL_BYTES
    max_items: Mapping[str, int] = field(default_factory=dict)
    max_chars: Mapping[str, int] = field(default_factory=dict)
    answer_bytes: int = CALL_BYTES
    max_running: int = 0
    read_direct: Callable[[bytes], object | None] | None = None
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

    def is_short(self, raw: bytes) -> bool:
        """Returns whether parsing takes less time than a change of threads is worth."""
        return len(raw) <= SMALL_BYTES and self._counter.has_at_most(raw, INLINE_ENTRIES)

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
            raise InvalidArgument(str(error), subject=error.path) from None
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
                size = _size(message, path.split("."))
                if size > limit:
                    raise InvalidArgument(
                        f"{path}: {size} {what} are more than {limit}", subject=path
                    )
        return message


def _size(message: Any, path: Sequence[str]) -> int:
    """Returns how many entries or characters a field has, of all messages that repeat on its way
    together."""
    value = getattr(message, path[0])
    if len(path) == 1:
        return len(value)
    entries = [value] if isinstance(value, Message) else value
    return sum(_size(entry, path[1:]) for entry in entries)


RequestTable: TypeAlias = Mapping[str, RequestBounds]
"""The bounds of each method of a service, by its name."""


def largest_request(table: RequestTable) -> int:
    """Returns the size in bytes of the largest message that any method reads."""
    return max(bounds.max_bytes for bounds in table.values())


class Source(Protocol):
    """A call whose messages are read one by one, such as gRPC's context."""

    async def read(self) -> Any:
        """Returns the next message's bytes, or grpc.aio.EOF."""


class RequestReader:
    """Reads requests within their callers' shares. `max_bytes` is the largest message that gRPC
    lets arrive, whichever method it is for."""

    def __init__(self, places: CallPlaces, max_bytes: int) -> None:
        self._places = places
        self._max_bytes = max_bytes

    async def place(self) -> Reservation:
        """Returns the memory of a message that is to be read. Raises ShareExceeded if the caller
        has none in time, or its earlier requests took too much work."""
        await self._places.request_work.wait(CALLER.get())
        return await wait_for(self._places.request_bytes, self._max_bytes)

    async def read(self, source: Source, bounds: RequestBounds, place: Reservation) -> Any:
        """Returns the only message of a call; `place` keeps its memory. Raises as
        RequestBounds.parse, and DeadlineExceeded if it does not arrive in time."""
        try:
            async with asyncio.timeout(ARRIVAL_SECONDS):
                raw = await source.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request has not arrived within {ARRIVAL_SECONDS:g} seconds",
                subject="request",
                reason="REQUEST_TOO_SLOW",
            ) from None
        if raw is grpc.aio.EOF:
            raise InvalidArgument("the call has no request", subject="request")
        place.shrink(max(CALL_BYTES, len(raw)))
        self._charge(len(raw))
        return await self._parse(raw, bounds)

    async def read_stream(self, source: Source, bounds: RequestBounds) -> AsyncGenerator[Any]:
        """Yields the messages of a stream, each read when it is asked for; of these only the one
        after which no more was asked for is charged: it was refused. Raises as RequestBounds.parse,
        and ShareExceeded if the caller's earlier requests took too much work."""
        await self._places.request_work.wait(CALLER.get())
        num_bytes = 0
        try:
            while (raw := await source.read()) is not grpc.aio.EOF:
                num_bytes = len(raw)
                parsing = self._parse(raw, bounds)
                del raw
                yield await parsing
            num_bytes = 0
        finally:
            self._charge(num_bytes)

    def _charge(self, num_bytes: int) -> None:
        """Charges the work of reading a message, if it is large."""
        if num_bytes > SMALL_BYTES:
            work_s = num_bytes / READ_BYTES_PER_SECOND
            self._places.request_work.charge(CALLER.get(), work_s)

    async def _parse(self, raw: bytes, bounds: RequestBounds) -> Any:
        bounds.check_size(raw)
        if bounds.read_direct is not None and (read := bounds.read_direct(raw)) is not None:
            return read
        if sum(bounds.max_items.values()) <= INLINE_ENTRIES or bounds.is_short(raw):
            return bounds.parse(raw)
        parsing = self._places.parsers_of(CALLER.get()).submit(bounds.parse, raw)
        return await asyncio.wrap_future(parsing)
