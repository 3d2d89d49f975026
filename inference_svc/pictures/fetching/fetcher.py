"""Fetches the images of calls, within bounds of time, bytes and number, and nothing for later."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from inference_svc.errors import ImageFetchFailed
from inference_svc.pictures.fetching.addresses import (
    AddressRefused,
    Lookup,
    check_addresses,
    look_up,
)
from inference_svc.pictures.fetching.exchange import Answer, FetchFailure, Outcome, ask
from inference_svc.pictures.fetching.hosts import Location, Origin, Wanted, not_allowed
from inference_svc.pictures.fetching.lookups import Lookups
from servicekit.errors import InvalidArgument, ShareExceeded
from servicekit.rpc.tls import invalid_setting
from servicekit.shares import Reservation, Shares

MAX_FETCHED_BYTES = 16 << 20
"""The files of a call's fetched images together."""
STEP_BYTES = 1 << 20
"""Memory is taken in such steps for a file whose length the host does not announce."""
FETCH_SECONDS = 10.0
"""The longest that a fetch may take, with the name's lookup, once it has its place; without
waiting for memory."""
PLACE_SECONDS = 10.0
"""How long a fetch waits for its place while others run, and for the memory of its file."""
NUM_FETCHES = 16
MAX_DETAIL_CHARS = 200
FETCH_WORK_SECONDS = 5e-3
"""The approximate processor time of a fetch in addition to its bytes, for lookup and TLS."""
BYTES_PER_SECOND = 100 << 20
"""The approximate rate at which one processor receives files over TLS."""

logger = logging.getLogger(__name__)


def make_context(ca_file: Path | None) -> ssl.SSLContext:
    """Returns a context that trusts the authorities of the file; None: the system's. Raises
    InvalidSetting, and OSError for a file that cannot be read."""
    if ca_file is not None:
        ca_file.read_bytes()  # ssl's own error does not name the file
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        why = f"{ca_file} has no PEM certificate"
        raise invalid_setting("image_tls_ca_file", why) from error
    context.set_alpn_protocols(["http/1.1"])
    return context


class ImageFetcher:
    """Fetches from `allowed` origins only. `fetches` bounds how many run at once, `memory` the
    bytes of files until they are decoded; `count` is called with each fetch's outcome. Lives on one
    event loop."""

    def __init__(
        self,
        allowed: frozenset[Origin],
        tls: ssl.SSLContext,
        fetches: Shares,
        memory: Shares,
        count: Callable[[Outcome], None],
        agent: str = "loadout",
        lookup: Lookup = look_up,
    ) -> None:
        self._allowed = allowed
        self._tls = tls
        self.fetches = fetches
        self._memory = memory
        self._count = count
        self._agent = agent
        self._lookups = Lookups(lookup)

    def check(self, wanted: Wanted) -> None:
        """Raises InvalidArgument for a host that is not allowed."""
        if wanted.location.origin not in self._allowed:
            self._count(Outcome.NOT_ALLOWED)
            raise not_allowed(wanted)

    async def fetch(
        self,
        images: Sequence[Wanted],
        account: str,
        places: list[Reservation],
        charge: Callable[[float], None],
    ) -> list[bytes]:
        """Returns the files of a call's images, in order. Adds their memory to `places`, also if it
        fails: the caller releases it once nothing reads the files. `charge` is called with the
        approximate seconds of a processor, also of failed fetches. Raises InvalidArgument,
        ImageFetchFailed and ShareExceeded; the other fetches end then."""
        files = _Files(self._memory, account, places, charge)
        try:
            async with asyncio.TaskGroup() as group:
                made = [group.create_task(self._fetch(each, account, files)) for each in images]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [each.result() for each in made]

    async def _fetch(self, wanted: Wanted, account: str, files: _Files) -> bytes:
        self.check(wanted)
        try:
            found = await self._in_time(wanted.location, account, files)
        except FetchFailure as failure:
            self._count(failure.outcome)
            _log(failure, wanted.location.origin)
            raise _to_error(failure, wanted) from None
        except ShareExceeded:
            self._count(Outcome.NO_ROOM)
            raise
        self._count(Outcome.DONE)
        return found

    async def _in_time(self, location: Location, account: str, files: _Files) -> bytes:
        with await self.fetches.wait(account, 1, PLACE_SECONDS):
            files.charge(FETCH_WORK_SECONDS)
            try:
                async with asyncio.timeout(FETCH_SECONDS) as timer:
                    addresses = await self._addresses(location.origin)
                    async with ask(location, addresses, self._tls, self._agent) as answer:
                        return await files.read(answer, timer)
            except TimeoutError:
                why = f"it takes longer than {FETCH_SECONDS:g} s"
                raise FetchFailure(Outcome.TIME, why) from None

    async def _addresses(self, origin: Origin) -> Sequence[str]:
        """Returns the addresses to connect to: the name is not looked up again, so that it cannot
        get other ones after the check. An address that the operator has written is not checked.
        Raises FetchFailure."""
        if origin.address is not None:
            return (origin.host,)
        try:
            found = await self._lookups.find(origin)
            check_addresses(origin, found)
        except AddressRefused as refused:
            why = "its name has an address that the server does not connect to"
            raise FetchFailure(Outcome.ADDRESS, why, str(refused)) from None
        except (OSError, UnicodeError) as error:
            raise FetchFailure(Outcome.ADDRESS, "its name has no address", str(error)) from None
        return found


class _Files:
    """The files of a call's images: the `places` of their memory, and the charges of their work."""

    def __init__(
        self,
        memory: Shares,
        account: str,
        places: list[Reservation],
        charge: Callable[[float], None],
    ) -> None:
        self._memory = memory
        self._account = account
        self._places = places
        self._turn = asyncio.Lock()
        self._size = 0
        self.charge = charge

    async def read(self, answer: Answer, timer: asyncio.Timeout) -> bytes:
        """Returns the body of an answer. Waits for memory while the timer stands still. Raises
        FetchFailure if the files are too large, before this one is read if its length is announced,
        and ShareExceeded if there is no memory in time."""
        counted = room = answer.length or 0
        self._count(counted)
        place = await self._take(room, timer) if room else None
        parts: list[bytes] = []
        size = 0
        async for part in answer.body():
            size += len(part)
            self.charge(len(part) / BYTES_PER_SECOND)
            if size > counted:
                self._count(size - counted)
                counted = size
            if size > room:
                step = max(size - room, min(STEP_BYTES, MAX_FETCHED_BYTES - self._size))
                place = await self._take(step, timer)
                room += step
            parts.append(part)
        if place is not None:
            place.shrink(place.amount - (room - size))
        return b"".join(parts)

    def _count(self, num_bytes: int) -> None:
        """Counts bytes that come, or will. Raises FetchFailure and ShareExceeded for more than the
        call may ever have."""
        self._size += num_bytes
        if self._size > MAX_FETCHED_BYTES:
            most = MAX_FETCHED_BYTES >> 20
            why = f"the fetched images of a request may have at most {most} MiB together"
            raise FetchFailure(Outcome.SIZE, why, is_final=True)
        try:
            self._memory.check(self._account, self._size)
        except ShareExceeded as error:
            message = f"{error.message}: send fewer or smaller images"
            raise ShareExceeded(message, subject=error.subject) from None

    async def _take(self, num_bytes: int, timer: asyncio.Timeout) -> Reservation:
        """Returns memory. Only a call without any waits for it: calls that keep some files while
        they wait for others could wait for each other. Raises ShareExceeded."""
        with _stopped(timer):
            async with self._turn:
                if any(each.amount for each in self._places):
                    place = self._memory.reserve(self._account, num_bytes)
                else:
                    place = await self._memory.wait(self._account, num_bytes, PLACE_SECONDS)
                self._places.append(place)
                return place


@contextmanager
def _stopped(timer: asyncio.Timeout) -> Iterator[None]:
    """Has a timer stand still, for waits that have limits of their own."""
    loop, end_s = asyncio.get_running_loop(), timer.when()
    assert end_s is not None
    left_s = end_s - loop.time()
    timer.reschedule(None)
    try:
        yield
    finally:
        timer.reschedule(loop.time() + left_s)


def _to_error(failure: FetchFailure, wanted: Wanted) -> InvalidArgument | ImageFetchFailed:
    """Returns the error for the caller: one to correct, or one to try again."""
    host = wanted.location.origin.entry
    message = f"{wanted.where}: no image from {host!a}: {failure.reason}"
    if failure.is_final:
        return InvalidArgument(message, subject=wanted.where)
    return ImageFetchFailed(f"{message}; try again, or send the image itself", subject=wanted.where)


def _log(failure: FetchFailure, origin: Origin) -> None:
    """Logs what only operators may know, such as addresses."""
    if failure.detail:
        detail = ascii(failure.detail)[:MAX_DETAIL_CHARS]
        facts = {"host": origin.entry, "outcome": failure.outcome.value, "detail": detail}
        logger.warning("no image from a host", extra=facts)
