"""Pulls: header, then chunks and layer ends in order, then the trailer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from adapter_store.core import ImageKey, ImagePart, Tenants
from adapter_store.images.partial_image import PartialImage
from adapter_store.images.share import Offer, Offers
from adapter_store.images.tiers.buffers import NotSealed
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.metrics.registry import Metrics
from contract.images.header import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
)
from servicekit.errors import InvalidArgument, ReaderStalled, ServiceError, ShareExceeded
from servicekit.pace import MinimumRate, Pace
from servicekit.shares import Reservation, Shares
from servicekit.telemetry.spans import Phases

MessageT = TypeVar("MessageT")

SHARE_WAIT_SECONDS = 5.0
"""How long a pull waits until its account's other pulls have let go of enough memory."""
LARGE_PULL_SECONDS = 600
"""How long the reader of an image that is larger than its account's share may take: it leaves
others less memory than they are due. A tenth of that behind, its pull ends."""
TAKE_SECONDS = 10.0
"""How long a file is offered."""
AWAITED_BYTES = 16 << 20
"""An image of at most so many bytes is shared even if it is being built, once that ends: its last
bytes come sooner than if the same processors also sent and received the first ones."""
AWAITED_SECONDS = 1.0
"""How long it is waited for: one that is built slowly is streamed part by part."""
CHUNK_BYTES = 512 << 10
"""The approximate length of a chunk: the chunks of a part have equal lengths, at most half more."""


@dataclass(eq=False, slots=True)
class ActivePull:
    """A pull in progress. `start_s` is monotonic time."""

    digest: str
    layout_id: str
    start_s: float
    sent_bytes: int = 0


@dataclass(slots=True)
class _HeldImage:
    """The part of its share that an account's pulls of one image take, once for any number of
    them."""

    reservation: Reservation
    num_pulls: int = 0

    def rate(self, num_bytes: int) -> MinimumRate | None:
        """Returns the bound of a pull of the image's bytes, beside the pace of all pulls."""
        return rate_of(self.reservation, num_bytes)


def rate_of(memory: Reservation, num_bytes: int) -> MinimumRate | None:
    """Returns the bound of a stream of so many bytes that holds this memory, beside the pace of all
    calls."""
    if not memory.is_over_share:
        return None
    return MinimumRate(Pace(max(1, num_bytes // LARGE_PULL_SECONDS), LARGE_PULL_SECONDS / 10))


class Pulls:
    """Streams images. Lives on the event loop. Calls `use_layout` with the layout of each pull.

    The images that an account's pulls keep in memory take its share of `held_bytes`."""

    def __init__(
        self,
        images: ImageCache,
        metrics: Metrics,
        use_layout: Callable[[str], None],
        held_bytes: Shares,
        offers: Offers | None = None,
    ) -> None:
        self._images = images
        self._offers = offers
        self._held_bytes = held_bytes
        self._held: dict[tuple[str, ImageKey], _HeldImage] = {}
        self._metrics = metrics
        self._use_layout = use_layout
        self.active: set[ActivePull] = set()

    @property
    def shared_images(self) -> Shares | None:
        """The places of images that are offered, or mapped by receivers."""
        return None if self._offers is None else self._offers.places

    @property
    def num_active(self) -> int:
        return len(self.active)

    async def stream(
        self,
        key: ImageKey,
        offset: int,
        image_id: str,
        tenants: Tenants = None,
        account: str = "",
        share_id: bytes = b"",
        *,
        wants_ends: bool = False,
    ) -> AsyncGenerator[PullMessage]:
        """Streams an image of one of these tenants from `offset` of `image_id`, or from 0 if the
        image has another id now. With this process's `share_id` a complete image is offered as a
        file, and its bytes are left out; with `wants_ends` its header is the only message.

        Each part is sent as soon as it is final, while others are still being built; if those
        fail, the stream ends with the error, and without its trailer. The image is held as long as
        the stream is open: copy a chunk before requesting the next.

        Raises as ImageCache.hold and PartialImage.wait_part, InvalidArgument for an offset beyond
        the image, ShareExceeded if the account's pulls keep its share of the memory, and
        ReaderStalled if an image larger than that is read too slowly.
        """
        start_s = time.monotonic()
        active = ActivePull(*key, start_s)
        self.active.add(active)
        result = "cancelled"
        phases = Phases()
        phases.enter("wait")
        failure: BaseException | None = None
        try:
            async with self._hold(key, tenants, account) as (image, rate):
                self._use_layout(key.layout_id)
                plan = await image.wait_plan()
                start = start_offset(offset, image_id, plan.image_id, plan.total_bytes)
                async with self._offered(image, start, share_id, account) as (offer, reason):
                    self._metrics.pull_wait_seconds.observe(time.monotonic() - start_s)
                    phases.enter("stream" if offer is None else "share")
                    ticket = b"" if offer is None else offer.ticket
                    header = replace(plan.header(start), share_ticket=ticket, not_shared=reason)
                    if offer is not None and wants_ends:
                        yield _whole(header, image)
                        self._count(active, plan.total_bytes)
                    else:
                        parts = self._parts(image, header, rate, active)
                        async with aclosing(parts) as messages:
                            async for message in messages:
                                yield message
                    result = "complete"
                    if offer is not None:
                        await _wait_released(offer)
        except BaseException as error:
            failure = error
            if isinstance(error, ServiceError):
                result = error.reason.lower()
            raise
        finally:
            phases.end(failure, bytes=active.sent_bytes)
            failure = None  # its traceback has this frame, which has the image's bytes
            self.active.discard(active)
            self._metrics.pulls.labels(result).inc()

    async def _parts(
        self,
        image: PartialImage,
        header: ImageHeader,
        rate: MinimumRate | None,
        active: ActivePull,
    ) -> AsyncGenerator[PullMessage]:
        """Yields the header and the messages that follow it: with a ticket without chunks."""
        yield header
        data = None if header.share_ticket else image.buffer.numpy().data
        for index in itertools.count(first_part(image.plan.parts, header.offset)):
            part = await image.wait_part(index)
            if part is None:
                break
            for message in paced(part_messages(data, part, header.offset), rate):
                yield message
            self._count(active, part.end - max(part.start, header.offset))
        yield ImageTrailer((await image.wait_complete()).sha256)

    def _count(self, active: ActivePull, num_bytes: int) -> None:
        self._metrics.pulled_bytes.inc(num_bytes)
        active.sent_bytes += num_bytes

    @asynccontextmanager
    async def _offered(
        self, image: PartialImage, start: int, share_id: bytes, account: str
    ) -> AsyncIterator[tuple[Offer | None, str]]:
        """Offers the image's file while the context lasts; yields None, and why, if its bytes are
        to be streamed."""
        offer, reason = None, ""
        with ExitStack() as stack:
            if not share_id:
                reason = ""
            elif self._offers is None or share_id != self._offers.share_id:
                reason = "other_store"
            elif start:
                reason = "resumed"
            else:
                if image.plan.total_bytes <= AWAITED_BYTES:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(AWAITED_SECONDS):
                            await image.wait_complete()
                try:
                    file = await image.sealed_file()
                    offer = stack.enter_context(self._offers.offer(file, account))
                except NotSealed as error:
                    reason = str(error)
                except ShareExceeded:
                    reason = "too_many"
            if self._offers is not None:
                how = "shared" if offer is not None else reason or "not_asked"
                self._metrics.count_share(how)
            yield offer, reason

    @asynccontextmanager
    async def _hold(
        self, key: ImageKey, tenants: Tenants, account: str
    ) -> AsyncIterator[tuple[PartialImage, MinimumRate | None]]:
        """Holds the image within the account's share of the memory, and yields also how fast it has
        to be read. Its size is known from the image only: without a share left it is let go while
        one is waited for."""
        share: Reservation | None = None
        try:
            while True:
                async with self._images.hold(key, tenants, account) as image:
                    num_bytes = min(image.plan.total_bytes, self._held_bytes.capacity)
                    if self._enter(key, account, num_bytes, share):
                        share = None
                        try:
                            yield image, self._held[account, key].rate(num_bytes)
                        finally:
                            self._leave(key, account)
                        return
                share = await self._held_bytes.wait(account, num_bytes, SHARE_WAIT_SECONDS)
        finally:
            if share is not None:
                share.release()

    def _enter(
        self, key: ImageKey, account: str, num_bytes: int, share: Reservation | None
    ) -> bool:
        """Counts a pull. Returns False if its image would exceed the account's share."""
        held = self._held.get((account, key))
        if held is None:
            try:
                held = _HeldImage(share or self._held_bytes.reserve(account, num_bytes))
            except ShareExceeded:
                return False
            self._held[account, key] = held
        elif share is not None:
            share.release()
        held.num_pulls += 1
        return True

    def _leave(self, key: ImageKey, account: str) -> None:
        held = self._held[account, key]
        held.num_pulls -= 1
        if not held.num_pulls:
            del self._held[account, key]
            held.reservation.release()


def start_offset(offset: int, offset_image_id: str, image_id: str, total_bytes: int) -> int:
    """Returns where a stream starts: at the requested offset, or at 0 if that belongs to another
    image.

    Raises InvalidArgument for an offset beyond the end.
    """
    if offset_image_id != image_id:
        return 0
    if offset > total_bytes:
        raise InvalidArgument(
            f"offset: {offset} is after the image's {total_bytes} bytes", subject="offset"
        )
    return offset


def first_part(parts: Sequence[tuple[int, int]], offset: int) -> int:
    """Returns the index of the first part [start, end) that ends after `offset`; their number if
    there is none."""
    return next((i for i, (_, end) in enumerate(parts) if end > offset), len(parts))


def part_messages(
    image: memoryview | None, part: ImagePart, offset: int
) -> Iterator[ImageChunk | LayerEnd]:
    """Yields the messages of a part: its bytes from `offset`, in chunks of about equal length, and
    its end. Nothing is copied. Without an image only its end."""
    start = max(part.start, offset)
    num_chunks = 0 if image is None else max(1, round((part.end - start) / CHUNK_BYTES))
    for index in range(num_chunks):
        assert image is not None
        begin, end = (start + (part.end - start) * i // num_chunks for i in (index, index + 1))
        yield ImageChunk(begin, image[begin:end])
    yield LayerEnd(part.index, part.end, part.sha256)


def _whole(header: ImageHeader, image: PartialImage) -> ImageHeader:
    """Returns the header of a complete image with all messages that would follow it."""
    return replace(
        header,
        ends=tuple(LayerEnd(part.index, part.end, part.sha256) for part in image.parts),
        trailer=ImageTrailer(image.image.sha256),
    )


async def _wait_released(offer: Offer) -> None:
    """Returns when the receiver has let go of the file. Raises ReaderStalled."""
    for event, seconds in ((offer.taken, TAKE_SECONDS), (offer.ended, LARGE_PULL_SECONDS)):
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            raise ReaderStalled(
                f"the image's file was not taken and let go of within {seconds:g} seconds",
                subject="share_id",
            ) from None


def paced(messages: Iterator[MessageT], rate: MinimumRate | None) -> Iterator[MessageT]:
    """Yields the messages, of which some have `data`. Raises ReaderStalled if their reader is
    slower than the rate."""
    for message in messages:
        if rate is None:
            yield message
            continue
        with rate.waiting():
            yield message
        rate.received(len(getattr(message, "data", b"")))
        if rate.is_too_slow:
            raise ReaderStalled(
                "this is larger than this tenant's share of the memory (--image-memory, "
                f"--tenant-share): it has to be read within {LARGE_PULL_SECONDS:g} seconds",
                subject="image_memory",
            )
