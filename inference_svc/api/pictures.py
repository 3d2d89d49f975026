"""Pictures of calls: counted, decoded, and held while their requests are open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace

from inference_svc.core import Request
from inference_svc.pictures.decoding import PictureDecoder, Tiles
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.text.chat import Chat
from inference_svc.text.prompt import Prompt
from servicekit.errors import InvalidArgument
from servicekit.shares import Reservation, Shares

PLACE_SECONDS = 10.0
"""How long a call waits while pixels of others take the memory."""


class PictureReader:
    """Reads the pictures of a server's calls; without a `rule`, refuses them. `pixels` bounds the
    bytes of pictures in open requests. `name` is the model's."""

    def __init__(self, rule: PictureRule | None, name: str, pixels: Shares) -> None:
        self.rule, self.name, self.pixels = rule, name, pixels
        self._decoder = None if rule is None else PictureDecoder(rule.processor)

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

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

    def check(self, chat: Chat, name: str) -> None:
        """Raises InvalidArgument for pictures that this server does not read, and texts that have
        the `name` of the token that stands for one."""
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
            if name and name in message.content:
                field = f"messages[{index}].content"
                raise InvalidArgument(
                    f"{field}: {name!a} stands for an image: send images as parts, and leave it "
                    "out of texts",
                    subject=f"chat.{field}",
                )

    def decode(self, data: bytes, where: str) -> Tiles:
        assert self._decoder is not None, "the server reads pictures"
        return self._decoder.decode(data, where)


class CallPictures:
    """Holds the memory of a call's pictures until `release`, or until nothing refers to it: a
    stream whose caller has left may never be read."""

    def __init__(self, reader: PictureReader) -> None:
        self._reader = reader
        self._places: list[Reservation] = []

    def __del__(self) -> None:
        self.release()

    async def read(
        self, prompt: Prompt, name: str, account: str, threads: Executor, num_choices: int
    ) -> tuple[Tiles, ...]:
        """Returns the tiles of a prompt's pictures, for so many requests. `name` is the text of the
        token that stands for a picture. Raises InvalidArgument naming the picture, and
        ShareExceeded."""
        if not isinstance(prompt, Chat):
            return ()
        self._reader.check(prompt, name)
        if not prompt.images:
            return ()
        rule, pixels = self._reader.rule, self._reader.pixels
        assert rule is not None
        # Each request has a copy in the engine.
        num_copies = 1 + num_choices
        amount = min(len(prompt.images) * rule.max_bytes * num_copies, pixels.capacity)
        place = await pixels.wait(account, amount, PLACE_SECONDS)
        self._places.append(place)
        loop = asyncio.get_running_loop()
        found = [
            await loop.run_in_executor(threads, self._reader.decode, each.data, each.where)
            for each in prompt.images
        ]
        place.shrink(num_copies * sum(len(each.pixels) for each in found))
        return tuple(found)

    def placed(self, requests: list[Request], pictures: Sequence[Tiles]) -> list[Request]:
        """Returns the requests of one prompt with its pictures."""
        if not pictures:
            return requests
        assert self._reader.rule is not None
        found = self._reader.rule.found(requests[0].prompt_token_ids, pictures)
        return [replace(each, pictures=found) for each in requests]

    def release(self) -> None:
        """Lets go of the memory. Idempotent."""
        while self._places:
            self._places.pop().release()
