"""One request for an image, over a connection of its own to an address that is known already.

Nothing else decides what is sent or where: no proxy, no redirect, no cookie, no credential, and no
environment. Of the answer only its status, its length and its body count.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import h11

from inference_svc.pictures.fetching.hosts import Location, Origin

CONNECT_SECONDS = 3.0
"""How long one address may take to connect, and for the handshake of TLS."""
MAX_ADDRESSES = 4
"""How many addresses of a host are tried."""
READ_BYTES = 32 << 10
MAX_HEAD_BYTES = 16 << 10
MAX_EXTRA_EVENTS, MIN_PART_BYTES = 256, 512
"""An answer may have so many more parts than one for each so many bytes: parsing many small ones
would hold up the event loop."""


class Outcome(enum.Enum):
    """How a fetch ended; metrics name it so."""

    DONE = "done"
    NOT_ALLOWED = "not_allowed"
    ADDRESS = "address"
    """The server does not connect to the host's address, or there is none."""
    CONNECTION = "connection"
    CERTIFICATE = "certificate"
    PROTOCOL = "protocol"
    REDIRECT = "redirect"
    STATUS = "status"
    SIZE = "size"
    TIME = "time"
    NO_ROOM = "no_room"


class FetchFailure(Exception):
    """A fetch failed for this reason, in words for its caller: they have nothing of the answer but
    its status. `detail` is for this server's log. `is_final`: another try fails, too."""

    def __init__(
        self, outcome: Outcome, reason: str, detail: str = "", *, is_final: bool = False
    ) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.detail = detail
        self.is_final = is_final


class Answer:
    """An answer with the status 200, whose body is still to be read. `length` None: not known."""

    def __init__(self, parts: AsyncIterator[h11.Event], length: int | None) -> None:
        self.length = length
        self._parts = parts

    async def body(self) -> AsyncIterator[bytes]:
        """Yields the body's parts. Raises FetchFailure."""
        async for event in self._parts:
            if isinstance(event, h11.Data):
                yield bytes(event.data)


@asynccontextmanager
async def ask(
    location: Location, addresses: Sequence[str], tls: ssl.SSLContext, agent: str
) -> AsyncIterator[Answer]:
    """Yields the answer of the first of a host's addresses that connects, and closes the connection
    afterwards. `agent` names this server. Raises FetchFailure."""
    reader, writer = await _connect(location.origin, addresses[:MAX_ADDRESSES], tls)
    try:
        parts = _events(location, reader, writer, agent)
        async with contextlib.aclosing(parts):
            yield await _answer(parts)
    finally:
        writer.transport.abort()  # no goodbye that a slow host could draw out


async def _connect(
    origin: Origin, addresses: Sequence[str], tls: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    failure = FetchFailure(Outcome.ADDRESS, "its name has no address")
    is_secure = origin.scheme == "https"
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await asyncio.open_connection(
                    address,
                    origin.port,
                    limit=READ_BYTES,
                    ssl=tls if is_secure else None,
                    server_hostname=origin.host if is_secure else None,
                )
        except ssl.SSLCertVerificationError as error:
            why = "its certificate is not valid for it, or no trusted authority has signed it"
            detail = f"{address}: {error.verify_message}"
            failure = FetchFailure(Outcome.CERTIFICATE, why, detail)
        except ssl.SSLError as error:
            failure = FetchFailure(Outcome.PROTOCOL, "TLS fails", f"{address}: {error.reason}")
        except TimeoutError:
            why = f"it does not connect within {CONNECT_SECONDS:g} s"
            failure = FetchFailure(Outcome.TIME, why, address)
        except OSError as error:
            why = "it cannot be reached"
            failure = FetchFailure(Outcome.CONNECTION, why, f"{address}: {error}")
    raise failure


async def _events(
    location: Location, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, agent: str
) -> AsyncGenerator[h11.Event]:
    """Sends the request, and yields the events of its answer, up to its end. Raises
    FetchFailure."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    headers = [
        ("Host", location.origin.authority),
        ("User-Agent", agent),
        ("Accept", "image/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    request = h11.Request(method="GET", target=location.target, headers=headers)
    num_events = num_bytes = 0
    try:
        writer.write(
            (connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b"")
        )
        await writer.drain()
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                data = await reader.read(READ_BYTES)
                num_bytes += len(data)
                connection.receive_data(data)
                continue
            assert isinstance(event, h11.Event), "only servers pause"
            num_events += 1
            if num_events > MAX_EXTRA_EVENTS + num_bytes // MIN_PART_BYTES:
                raise FetchFailure(Outcome.PROTOCOL, "its answer has too many small parts")
            yield event
    except h11.RemoteProtocolError as error:
        why = "it does not answer as HTTP/1.1 does, or not to the end"
        raise FetchFailure(Outcome.PROTOCOL, why, str(error)) from None
    except OSError as error:
        why = "the connection breaks before the end of its answer"
        raise FetchFailure(Outcome.CONNECTION, why, str(error)) from None


async def _answer(parts: AsyncIterator[h11.Event]) -> Answer:
    """Reads the head of an answer. Raises FetchFailure if it has no plain file."""
    async for event in parts:
        if not isinstance(event, h11.Response):
            continue  # 103 Early Hints and the like
        status, headers = event.status_code, dict(event.headers)
        if 300 <= status < 400:
            why = f"it answers {status}, and the server follows no redirects: send the final URL"
            raise FetchFailure(Outcome.REDIRECT, why, is_final=True)
        if status != 200:
            is_final = status < 500 and status not in (408, 425, 429)
            raise FetchFailure(Outcome.STATUS, f"it answers {status}", is_final=is_final)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            why = "it answers with a compressed file, though it was asked for a plain one"
            raise FetchFailure(Outcome.PROTOCOL, why, is_final=True)
        length = headers.get(b"content-length")
        return Answer(parts, None if length is None else int(length))
    raise FetchFailure(Outcome.PROTOCOL, "it does not answer")
