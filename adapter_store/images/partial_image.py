"""An image on its way into memory: whoever follows it reads each part as soon as it is final."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import torch

from adapter_store.core import ImagePart
from adapter_store.images.compile import Image
from adapter_store.images.plan import ImagePlan
from servicekit.errors import Draining


class GrowingImage:
    """One thread fills `buffer` (uint8 [plan.total_bytes]) and says so; the event loop follows.

    Of `buffer`, the bytes of `parts` are final; `parts` only grows, in order.
    """

    def __init__(self, plan: ImagePlan, buffer: torch.Tensor) -> None:
        self.plan = plan
        self.buffer = buffer
        self.parts: list[ImagePart] = []
        self._is_complete = False
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []

    def add(self, part: ImagePart) -> None:
        """The next part is final. From the filling thread."""
        assert part.index == len(self.parts)
        self.parts.append(part)
        self._loop.call_soon_threadsafe(self._wake)

    def follow(self, parts: Iterable[ImagePart]) -> None:
        """Adds each of the further parts as it comes. From the filling thread."""
        for part in parts:
            self.add(part)

    def complete(self) -> Image:
        """All parts are final and the whole is checked. From the filling thread."""
        assert len(self.parts) == len(self.plan.parts)
        self._is_complete = True
        self._loop.call_soon_threadsafe(self._wake)
        return Image(self.plan, self.buffer, tuple(self.parts))

    def fail(self, failure: BaseException) -> None:
        """It will never be complete, and nothing is written any more. On the event loop."""
        if isinstance(failure, asyncio.CancelledError):
            failure = Draining("this store is shutting down")
        self._failure = failure
        self._wake()

    async def part(self, index: int) -> ImagePart | None:
        """Part `index`, once it is final; None after the last, once the whole is checked.

        Raises why the image failed, for every part that was not final by then.
        """
        while True:
            if index < len(self.parts):
                return self.parts[index]
            if self._is_complete:
                return None
            if self._failure is not None:
                raise self._failure
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    async def whole(self) -> Image:
        """The image when it is complete. Raises why it failed."""
        await self.part(len(self.plan.parts))
        return Image(self.plan, self.buffer, tuple(self.parts))

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
