"""Pictures of calls: counted, decoded, and held while their requests are open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from inference_svc.core import Request
from inference_svc.pictures.decoding import NUM_CHILDREN, PictureDecoder, Tiles
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.text.chat import Chat, MessageImage
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument
from servicekit.shared_memory import descriptors_for
from servicekit.shares import FairExecutor, Reservation, Shares, limit_of
from servicekit.work_budget import WorkBudget

PLACE_SECONDS = 10.0
"""How long a call waits while pixels of others take the memory."""
PROCESSORS = 0.5
"""Processors that decoding for one account may take on average: some four photos of a camera a
second, or many more that were made smaller."""


MAX_FILES = 4096
"""The most pictures of open requests: each takes a file, also until the engine has mapped it."""


class PictureReader:
    """Reads the pictures of a server's calls; without a `rule`, refuses them. `pixels` bounds the
    bytes of pictures in open requests, and each account's share of decoders. `name` is the
    model's."""

    def __init__(self, rule: PictureRule | None, name: str, pixels: Shares) -> None:
        self.rule, self.name, self.pixels = rule, name, pixels
        self.least_bytes = pixels.capacity // max(1, descriptors_for(MAX_FILES))
        """The bytes that a small picture counts as: each has a file, too."""
        self.work = WorkBudget("image_work", pixels.share, PROCESSORS)
        self.decoder = None if rule is None else PictureDecoder(rule.processor)
        # Each waits for a process, and would keep short prompts of others from their own threads.
        self._threads = (
            None if rule is None else FairExecutor(NUM_CHILDREN, "prompt_images", pixels.share)
        )

    @property
    def places(self) -> tuple[Shares, ...]:
        """The resources that accounts share; none if no pictures are read."""
        return () if self._threads is None else (self.pixels, self._threads.shares)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
        if self.decoder is not None:
            self.decoder.close()

    @contextmanager
    def of_call(self) -> Iterator[CallPictures]:
        """Yields the pictures of one call, which are let go of if the call fails before its stream
        begins."""
        call = CallPictures(self)
        try:
            yield call
        except BaseException:
            call.release()
            raise

    def check(self, chat: Chat, names: Sequence[str]) -> None:
        """Raises InvalidArgument for pictures that this server does not read, and texts that have
        one of the `names` of the tokens that stand for one."""
        images = chat.images
        if images and self.rule is None:
            where = images[0].where
            raise InvalidArgument(f"{where}: {self.name} reads no images here", subject=where)
        if self.rule is None:
            return
        if len(images) > self.rule.max_pictures:
            where = images[self.rule.max_pictures].where
            raise InvalidArgument(
                f"{where}: a request may have at most {self.rule.max_pictures} images",
                subject=where,
            )
        for index, message in enumerate(chat.messages):
            name = next((each for each in names if each and each in message.content), "")
            if name:
                field = f"messages[{index}].content"
                raise InvalidArgument(
                    f"{field}: {name!a} stands for an image: send images as parts, and leave it "
                    "out of texts",
                    subject=f"chat.{field}",
                )

    def decode(
        self, image: MessageImage, account: str, is_cancelled: threading.Event
    ) -> Future[Tiles]:
        """Has a thread decode a file, until it is cancelled. The time is charged to the account's
        `work`. Raises ShareExceeded if too many files wait."""
        assert self._threads is not None, "the server reads pictures"
        return self._threads.submit(account, self._decode, image, account, is_cancelled)

    def _decode(self, image: MessageImage, account: str, is_cancelled: threading.Event) -> Tiles:
        assert self.decoder is not None, "the server reads pictures"

        def check() -> None:
            if is_cancelled.is_set():
                raise CancelledError

        start_s = time.monotonic()
        try:
            return self.decoder.decode(image.data, image.where, check)
        finally:
            # A process has taken it, not this thread.
            self.work.charge(account, time.monotonic() - start_s)


class CallPictures:
    """Holds the memory of a call's pictures until `release`, or until nothing refers to it: a
    stream whose caller has left may never be read."""

    def __init__(self, reader: PictureReader) -> None:
        self._reader = reader
        self._places: list[Reservation] = []
        self.decoding: Future[Tiles] | None = None
        """The decoding of a file, until it has ended; also after the call was cancelled."""

    def __del__(self) -> None:
        self.release()

    def of_prompt(self, prompt: Prompt, names: Sequence[str], account: str) -> ReadPictures:
        """Returns the pictures of a prompt, to be read. `names` are the texts of the tokens that
        stand for pictures. Raises InvalidArgument naming the picture."""
        if not isinstance(prompt, Chat):
            return ReadPictures(self, (), account)
        self._reader.check(prompt, names)
        return ReadPictures(self, prompt.images, account)

    async def read(self, images: Sequence[MessageImage], account: str) -> tuple[Tiles, ...]:
        """Returns the tiles of a prompt's images, which all its requests share. Raises
        InvalidArgument naming the image, and ShareExceeded, also where the account's earlier ones
        took too much work."""
        if not images:
            return ()
        rule, pixels = self._reader.rule, self._reader.pixels
        assert rule is not None
        # All of them might be large. No account may hold more than its share for a whole answer.
        amount = len(images) * max(rule.processor.max_bytes, self._reader.least_bytes)
        most = limit_of(pixels.capacity, 0, pixels.share)
        place = await pixels.wait(account, min(amount, most), PLACE_SECONDS)
        self._places.append(place)
        found: list[Tiles] = []
        num_bytes = 0
        for each in images:
            found.append(await self._decoded(each, account))
            num_bytes += max(found[-1].pixels.num_bytes, self._reader.least_bytes)
            if num_bytes > place.amount:
                place.grow(num_bytes - place.amount)
        place.shrink(num_bytes)
        return tuple(found)

    async def _decoded(self, image: MessageImage, account: str) -> Tiles:
        async with self._reader.work.turn(account):
            is_cancelled = threading.Event()
            self.decoding = self._reader.decode(image, account, is_cancelled)
            try:
                return await asyncio.wrap_future(self.decoding)
            except asyncio.CancelledError:
                is_cancelled.set()
                raise
            finally:
                if self.decoding.done():  # its error would refer to this call, and the call to it
                    self.decoding = None

    def placed(self, requests: list[Request], pictures: Sequence[Tiles]) -> list[Request]:
        """Returns the requests of one prompt with its pictures."""
        if not pictures:
            return requests
        assert self._reader.rule is not None
        found = self._reader.rule.found(requests[0].prompt_token_ids, pictures)
        return [replace(each, pictures=found) for each in requests]

    def release(self) -> None:
        """Lets go of the memory, as soon as no file is decoded into it. Idempotent."""
        while self._places:
            place = self._places.pop()
            if self.decoding is None:
                place.release()
            else:
                self.decoding.add_done_callback(partial(_release, place))


def _release(place: Reservation, _: Future[Tiles]) -> None:
    place.release()


class ReadPictures:
    """The pictures of a prompt of a call: `tiles`, once they are read."""

    def __init__(
        self,
        call: CallPictures,
        images: Sequence[MessageImage],
        account: str,
    ) -> None:
        self._call, self._images, self._account = call, images, account
        self.tiles: tuple[Tiles, ...] = ()

    @property
    def num_pictures(self) -> int:
        return len(self._images)

    async def read(self) -> tuple[Tiles, ...]:
        """Returns the tiles, and keeps them. Raises like `CallPictures.read`."""
        self.tiles = await self._call.read(self._images, self._account)
        return self.tiles
