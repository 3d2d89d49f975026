"""Pictures of calls: uploaded, fetched, decoded, and held while their requests are open."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from inference_svc.core import Principal, Request
from inference_svc.errors import ImageNotFound
from inference_svc.pictures.decoding import NUM_CHILDREN, PictureDecoder, Tiles
from inference_svc.pictures.fetching.hosts import Wanted, not_allowed
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.uploads import UploadedFile, UploadKey, Uploads
from inference_svc.text.chat import Chat, MessageImage
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument, ShareExceeded
from servicekit.shared_memory import descriptors_for
from servicekit.shares import FairExecutor, Reservation, Shares
from servicekit.work_budget import WorkBudget

if TYPE_CHECKING:
    from inference_svc.pictures.fetching.fetcher import ImageFetcher

P = ParamSpec("P")
T = TypeVar("T")

PLACE_SECONDS = 10.0
"""How long a call waits while pixels of others take the memory."""
PROCESSORS = 0.5
"""Processors that decoding for one account may take on average: some four photos of a camera a
second, or many more that were made smaller."""
MAX_FILES = 4096
"""The most pictures of open requests: each takes a file, also until the engine has mapped it."""
HASH_BYTES_PER_SECOND = 200 << 20
"""The approximate rate at which one processor receives and hashes a file."""
CHUNK_SECONDS = 100e-6
"""The approximate time of a processor for a message with a part of a file, however small."""
EXPIRY_SECONDS = 60.0
"""How often files are looked at that nobody has used for long, where no call does it."""


class PictureReader:
    """Reads the pictures of a server's calls; without a `rule`, refuses them. `pixels` bounds the
    bytes of pictures in open requests, and each account's share of decoders; `uploads` are files
    that calls name by their hashes. `name` is the model's. `fetcher` None: no URLs are fetched."""

    def __init__(
        self,
        rule: PictureRule | None,
        name: str,
        pixels: Shares,
        uploads: Uploads,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        self.rule, self.name, self.pixels, self.uploads = rule, name, pixels, uploads
        self.fetcher = fetcher
        self.least_bytes = pixels.capacity // max(1, descriptors_for(MAX_FILES))
        """The bytes that a small picture counts as: each has a file, too."""
        self.work = WorkBudget("image_work", pixels.share, PROCESSORS)
        self.decoder = None if rule is None else PictureDecoder(rule.processor)
        # Each waits for a process, and would keep short prompts of others from their own threads.
        self._threads = (
            None if rule is None else FairExecutor(NUM_CHILDREN, "prompt_images", pixels.share)
        )

    @property
    def places(self) -> tuple[Shares | Uploads, ...]:
        """The resources that accounts share; none if no pictures are read."""
        if self._threads is None:
            return ()
        fetches = () if self.fetcher is None else (self.fetcher.fetches,)
        return (self.pixels, self._threads.shares, self.uploads, *fetches)

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
        for wanted in _wanted(images):
            if self.fetcher is None:
                raise not_allowed(wanted)
            self.fetcher.check(wanted)
        for index, message in enumerate(chat.messages):
            name = next((each for each in names if each and each in message.content), "")
            if name:
                field = f"messages[{index}].content"
                raise InvalidArgument(
                    f"{field}: {name!a} stands for an image: send images as parts, and leave it "
                    "out of texts",
                    subject=f"chat.{field}",
                )

    def measure(
        self, image: MessageImage, account: str, is_cancelled: threading.Event
    ) -> Future[int]:
        """Has a thread find the bytes of the pixels that a file will have. Parameters, charges and
        errors as of `decode`."""
        return self._submit(account, self._measure, image, account, is_cancelled)

    def decode(
        self, image: MessageImage, account: str, is_cancelled: threading.Event
    ) -> Future[Tiles]:
        """Has a thread decode a file, until it is cancelled. The processor time is charged to
        the account's `work`. Raises ShareExceeded if too many files wait."""
        return self._submit(account, self._decode, image, account, is_cancelled)

    def hash(
        self, image: MessageImage, account: str, is_cancelled: threading.Event
    ) -> Future[bytes]:
        """Has a thread find the sha256 of a file. Parameters, charges and errors as of `decode`."""
        return self._submit(account, self._hash, image, account, is_cancelled)

    def _submit(
        self, account: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        assert self._threads is not None, "the server reads pictures"
        return self._threads.submit(account, function, *args, **kwargs)

    def _measure(self, image: MessageImage, account: str, is_cancelled: threading.Event) -> int:
        assert self.decoder is not None, "the server reads pictures"
        check, charge = partial(_check, is_cancelled), partial(self.work.charge, account)
        measure = self.decoder.measure
        # This thread's time, too: it sends the file to a process.
        return self.work.run(account, measure, image.data, image.where, check, charge)

    def _hash(self, image: MessageImage, account: str, is_cancelled: threading.Event) -> bytes:
        _check(is_cancelled)
        return self.work.run(account, lambda: hashlib.sha256(image.data).digest())

    def _decode(self, image: MessageImage, account: str, is_cancelled: threading.Event) -> Tiles:
        assert self.decoder is not None, "the server reads pictures"
        check, charge = partial(_check, is_cancelled), partial(self.work.charge, account)
        decode = self.decoder.decode
        # This thread's time, too: it copies the pixels, and hashes them.
        return self.work.run(account, decode, image.data, image.where, check, charge)


def _check(is_cancelled: threading.Event) -> None:
    if is_cancelled.is_set():
        raise CancelledError


class CallPictures:
    """Holds the memory of a call's pictures until `release`, or until nothing refers to it: a
    stream whose caller has left may never be read. Holds files until they are decoded: uploaded
    ones, and the memory of fetched ones."""

    def __init__(self, reader: PictureReader) -> None:
        self._reader = reader
        self._places: list[Reservation] = []
        self._files: list[UploadedFile] = []
        self._fetched: list[Reservation] = []
        self.decoding: Future[Any] | None = None
        """The work on a file, until it has ended; also after the call was cancelled."""

    def __del__(self) -> None:
        self.release()

    def of_prompt(
        self, prompt: Prompt, name_of: Callable[[int], str], account: str, cache_salt: str
    ) -> ReadPictures:
        """Returns the pictures of a prompt, to be read. `name_of` returns the text of a token.
        Raises InvalidArgument naming the picture, and ImageNotFound for one that was not uploaded
        by this account with this salt."""
        if not isinstance(prompt, Chat):
            return ReadPictures(self, (), account)
        rule = self._reader.rule
        self._reader.check(prompt, () if rule is None else rule.names(name_of))
        images = [self._with_file(each, account, cache_salt) for each in prompt.images]
        return ReadPictures(self, images, account)

    def _with_file(self, image: MessageImage, account: str, cache_salt: str) -> MessageImage:
        """Returns the image with the file that it names, which is held. Raises ImageNotFound."""
        if not image.sha256:
            return image
        file = self._reader.uploads.hold(UploadKey(account, cache_salt, image.sha256))
        if file is None:
            # The same for a file of others: nobody learns what they have.
            raise ImageNotFound(
                f"{image.where}: this server has no uploaded image with this hash: upload it "
                "again, then send the request again",
                subject=image.where,
            )
        self._files.append(file)
        return replace(image, data=file.data)

    async def fetched(self, images: Sequence[MessageImage], account: str) -> Sequence[MessageImage]:
        """Returns a prompt's images, each with its file. Fetched files are held, also if this
        fails, until `let_go_of_files`. Raises like `ImageFetcher.fetch`, and ShareExceeded if the
        account's earlier images took too much work."""
        wanted, fetcher, work = _wanted(images), self._reader.fetcher, self._reader.work
        if not wanted:
            return images
        assert fetcher is not None, "the images are checked"
        await work.wait(account)

        charge = partial(work.charge, account)
        files = iter(await fetcher.fetch(wanted, account, self._fetched, charge))
        return [each if each.location is None else _filled(each, next(files)) for each in images]

    async def read(self, images: Sequence[MessageImage], account: str) -> tuple[Tiles, ...]:
        """Returns the tiles of a prompt's images, which all its requests share, and equal files.
        Raises InvalidArgument naming the image, and ShareExceeded, also where the account's earlier
        ones took too much work."""
        if not images:
            return ()
        reader, least = self._reader, self._reader.least_bytes
        keys = await self._keys(images, account)
        files: dict[bytes | int, MessageImage] = {}
        for key, image in zip(keys, images, strict=True):
            files.setdefault(key, image)
        # Each file has a turn of its own, so that others' files are read between. All headers are
        # read first: sizes that the files might have would leave others none.
        sizes = [
            await self._done(partial(reader.measure, each), account) for each in files.values()
        ]
        place = await _room(reader.pixels, account, sum(max(each, least) for each in sizes))
        self._places.append(place)
        found = {
            key: await self._done(partial(reader.decode, each), account)
            for key, each in files.items()
        }
        num_bytes = sum(max(each.pixels.num_bytes, least) for each in found.values())
        if num_bytes > place.amount:
            place.grow(num_bytes - place.amount)
        place.shrink(num_bytes)
        return tuple(found[key] for key in keys)

    async def _keys(self, images: Sequence[MessageImage], account: str) -> list[bytes | int]:
        """Returns a key for each image's file, the same for equal files alone: the sha256, if there
        is another file of its length."""
        lengths = Counter(len(each.data) for each in images)
        keys = [each.sha256 or index for index, each in enumerate(images)]
        for place, each in enumerate(images):
            if not each.sha256 and lengths[len(each.data)] > 1:
                sha256 = await self._done(partial(self._reader.hash, each), account)
                keys[place] = sha256
        return keys

    async def _done(self, begin: Callable[[str, threading.Event], Future[T]], account: str) -> T:
        """Returns the result of work on files, once it is the account's turn."""
        async with self._reader.work.turn(account):
            is_cancelled = threading.Event()
            self.decoding = found = begin(account, is_cancelled)
            try:
                return await asyncio.wrap_future(found)
            except asyncio.CancelledError:
                is_cancelled.set()
                raise
            finally:
                if found.done():  # its error would refer to this call, and the call to it
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
        self.let_go_of_files()
        while self._places:
            self._after_decoding(self._places.pop().release)

    def let_go_of_files(self) -> None:
        """Lets go of uploaded and fetched files, as soon as none of them is decoded. Idempotent."""
        while self._fetched:
            self._after_decoding(self._fetched.pop().release)
        while self._files:
            self._after_decoding(partial(self._reader.uploads.let_go, self._files.pop()))

    def _after_decoding(self, end: Callable[[], None]) -> None:
        if self.decoding is None:
            end()
        else:
            self.decoding.add_done_callback(partial(_call, end))


async def _room(pixels: Shares, account: str, num_bytes: int) -> Reservation:
    """Returns the memory for a call's pixels. Raises ShareExceeded, with advice where no retry
    helps."""
    try:
        # No account may hold more than its share for a whole answer.
        pixels.check(account, num_bytes)
    except ShareExceeded as error:
        message = f"{error.message}: send fewer or smaller images"
        raise ShareExceeded(message, subject=error.subject) from None
    return await pixels.wait(account, num_bytes, PLACE_SECONDS)


def _call(end: Callable[[], None], _: Future[Any]) -> None:
    end()


def _wanted(images: Sequence[MessageImage]) -> list[Wanted]:
    """Returns the images that are to be fetched, in order."""
    return [Wanted(each.location, each.where) for each in images if each.location is not None]


def _filled(image: MessageImage, data: bytes) -> MessageImage:
    return replace(image, data=data, location=None)


class ReadPictures:
    """The pictures of a prompt of a call: `tiles`, once they are read."""

    def __init__(
        self,
        call: CallPictures,
        images: Sequence[MessageImage],
        account: str,
    ) -> None:
        self._call, self._images, self._account = call, images, account
        self.num_pictures = len(images)
        self.tiles: tuple[Tiles, ...] = ()

    async def read(self) -> tuple[Tiles, ...]:
        """Returns the tiles, and keeps them in place of the files. Raises like
        `CallPictures.fetched` and `read`. Called once."""
        images, self._images = self._images, ()
        try:
            found = await self._call.fetched(images, self._account)
            self.tiles = await self._call.read(found, self._account)
        finally:
            self._call.let_go_of_files()
        return self.tiles


class ImageUploads:
    """Receives the files of images. Their work is charged to `work`. Lives on one event loop."""

    def __init__(self, reader: PictureReader, work: WorkBudget) -> None:
        self._reader = reader
        self._files = reader.uploads
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    async def receive(
        self, principal: Principal, size: int, cache_salt: str, chunks: AsyncIterator[bytes]
    ) -> bytes:
        """Returns the sha256 of a file of this many bytes, which requests of the same account and
        salt can name from now on. Raises InvalidArgument, ShareExceeded, and errors of `chunks`."""
        if self._reader.rule is None:
            raise InvalidArgument(f"{self._reader.name} reads no images here", subject="upload")
        account = principal.account
        with self._files.begin(account, size) as file:
            async for chunk in chunks:
                cost_s = CHUNK_SECONDS + len(chunk) / HASH_BYTES_PER_SECOND
                self._work.charge(account, cost_s)
                file.add(chunk)
            sha256 = file.keep(cache_salt)
        self._expire_later()
        return sha256

    def _expire_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(EXPIRY_SECONDS, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._files.expire()
        if self._files.use().used:
            self._expire_later()
