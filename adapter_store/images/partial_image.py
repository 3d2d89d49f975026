"""An image that is being filled: readers get each part as soon as it is final."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import torch

from adapter_store.core import ImagePart
from adapter_store.images.compile import Image
from adapter_store.images.plan.plan import ImagePlan
from adapter_store.images.tiers.buffers import Buffer, NotSealed
from servicekit.errors import Draining


class PartialImage:
    """One thread fills `memory`, of plan.total_bytes, part by part; readers wait for parts on the
    event loop.

    The bytes of `parts` are final; `parts` only grows, in order.
    """

    def __init__(self, plan: ImagePlan, memory: Buffer) -> None:
        self.plan = plan
        self.memory = memory
        self.parts: list[ImagePart] = []
        self._is_complete = False
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []
        self._sealing = asyncio.Lock()

    @property
    def buffer(self) -> torch.Tensor:
        """The bytes, uint8 [plan.total_bytes]."""
        return self.memory.data

    def set_plan(self, plan: ImagePlan) -> None:
        """Replaces the plan by the same with scales. Called by the filling thread."""
        assert plan.has_scales
        self.plan = plan
        self._loop.call_soon_threadsafe(self._wake)

    def append(self, part: ImagePart) -> None:
        """Adds the next part, which is final. Called by the filling thread."""
        assert part.index == len(self.parts)
        self.parts.append(part)
        self._loop.call_soon_threadsafe(self._wake)

    def extend(self, parts: Iterable[ImagePart]) -> None:
        """Appends each of the further parts as the iterator yields it. Called by the filling
        thread."""
        for part in parts:
            self.append(part)

    def complete(self) -> None:
        """Marks the image as final and checked. Called by the filling thread."""
        assert len(self.parts) == len(self.plan.parts)
        self._is_complete = True
        self.plan = self.plan.without_sources()
        self._loop.call_soon_threadsafe(self._wake)

    @property
    def image(self) -> Image:
        """The complete image, in the memory where it is now: do not keep it."""
        assert self._is_complete
        return Image(self.plan, self.buffer, tuple(self.parts))

    def fail(self, failure: BaseException) -> None:
        """Marks the image as never complete, and no longer written to. Called on the event loop."""
        if isinstance(failure, asyncio.CancelledError):
            failure = Draining("this store is shutting down")
        self._failure = failure
        self._wake()

    async def wait_plan(self) -> ImagePlan:
        """Returns the plan once it has scales. Raises the failure of the image."""
        while not self.plan.has_scales:
            await self._wait()
        return self.plan

    async def wait_part(self, index: int) -> ImagePart | None:
        """Returns part `index` once it is final; None after the last, once the image is checked.

        Raises the failure of the image, for every part that was not final by then.
        """
        while True:
            if index < len(self.parts):
                return self.parts[index]
            if self._is_complete:
                return None
            await self._wait()

    async def _wait(self) -> None:
        """Returns when something has changed. Raises the failure of the image."""
        if self._failure is not None:
            raise self._failure
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    async def wait_complete(self) -> Image:
        """Returns the image when it is complete. Raises its failure."""
        await self.wait_part(len(self.plan.parts))
        return self.image

    async def sealed_file(self) -> int:
        """Returns the descriptor of the image's file, as Buffer.sealed_file. Raises NotSealed."""
        if not self._is_complete:
            raise NotSealed("building")
        if self.memory.is_sealed:
            return self.memory.sealed_file()
        self.memory.set_final()  # not later: the pool may get it while it is being sealed
        async with self._sealing:
            # Not on the event loop: of a large image it takes as long as many chunks.
            return await asyncio.to_thread(self.memory.sealed_file)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
