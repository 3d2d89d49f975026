"""Images for pulls: memory, else made from a further tier or the blob; each at most once at a time.

Lives on the event loop. Work runs in a bounded pool of threads, where pulls go before work ahead.
An image is followed while it is made, so its first bytes leave before its last are there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import NamedTuple

from adapter_store.core import ImageKey, Tenants
from adapter_store.errors import Overloaded
from adapter_store.images.buffers import resident_buffer
from adapter_store.images.builder import Build, ImageBuilder, NotAhead
from adapter_store.images.disk_tier import DiskTier, TierCounts
from adapter_store.images.memory_tier import MemoryEntry, MemoryTier, Room
from adapter_store.images.partial_image import GrowingImage
from adapter_store.images.worker_pool import Priority, Workers
from servicekit.errors import Draining, ServiceError
from servicekit.telemetry.spans import child_span

logger = logging.getLogger(__name__)

ROOM_SECONDS = 5.0
"""How long a pull waits for room in memory."""
MAX_WAITING = 64
"""Images that wait for room at the same time; each keeps its plan meanwhile."""
RETRY_SECONDS = 1.0


class _Flight:
    """The work on one image. `begun` gives it as soon as it grows."""

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self.task: asyncio.Task[None]
        self.begun: asyncio.Future[MemoryEntry] = asyncio.get_running_loop().create_future()
        self.room: Room | None = None


class ImageInProgress(NamedTuple):
    """What it is made for, such as "pull" or "ahead", and whether it has got room and grows."""

    digest: str
    layout_id: str
    priority: str
    is_growing: bool


class Images:
    """The tiers and the builder behind them. `refresh_pinned` says which keys are pinned."""

    def __init__(
        self,
        builder: ImageBuilder,
        disk: DiskTier,
        workers: Workers,
        calls: Executor,
        memory_bytes: int,
        room_seconds: float = ROOM_SECONDS,
    ) -> None:
        self._builder = builder
        self._disk = disk
        self._workers = workers
        self._calls = calls
        self._room_seconds = room_seconds
        self._pinned: frozenset[ImageKey] = frozenset()
        self._memory = MemoryTier(memory_bytes, lambda key: key in self._pinned)
        self._flights: dict[ImageKey, _Flight] = {}
        self._num_waiting = 0
        self._spare_task: asyncio.Task[None] | None = None

    @property
    def memory_counts(self) -> TierCounts:
        return self._memory.counts

    @property
    def disk_counts(self) -> TierCounts:
        return self._disk.counts

    @property
    def num_in_progress(self) -> int:
        """Images being made or written, or waiting for it."""
        return len(self._flights)

    @property
    def num_waiting_for_room(self) -> int:
        return self._num_waiting

    def in_progress(self) -> list[ImageInProgress]:
        """What `num_in_progress` counts."""
        return [
            ImageInProgress(*key, flight.priority.name.lower(), flight.begun.done())
            for key, flight in self._flights.items()
        ]

    @asynccontextmanager
    async def hold(self, key: ImageKey, tenants: Tenants = None) -> AsyncIterator[GrowingImage]:
        """The image of (digest, layout_id), complete or being made, in memory while the context
        lasts. One that none of these tenants has a record of is not found.

        Raises NotFound, IncompatibleAdapter and CorruptData, as ImageBuilder.plan, and Overloaded
        if no room was found for it; GrowingImage.part raises what goes wrong later.
        """
        # What is in memory may have been deleted: only the catalog knows.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._calls, self._builder.check, key, tenants)
        entry = self._memory.find(key)
        while entry is None or entry.is_freed:
            try:
                entry = await self._begin(key)
            except NotAhead:  # joined work ahead that gave up; now it is for a pull
                continue
        with self._memory.hold(entry):
            yield entry.image

    async def prepare(self, key: ImageKey) -> None:
        """Makes the image ahead of any pull: on disk, and if pinned also in memory.

        Never takes the place on disk of what pulls have used. What cannot be made is logged, not
        raised.
        """
        if key in self._memory:
            return
        flight = self._fly(key, Priority.PINNED if key in self._pinned else Priority.AHEAD)
        try:
            await asyncio.shield(flight.task)
        except NotAhead:
            logger.debug("not to be compiled ahead", extra={"digest": key.digest})
        except ServiceError as error:
            logger.info("not compiled ahead", extra={"digest": key.digest, "why": str(error)})
        except Exception:
            logger.exception("compiling ahead failed", extra={"digest": key.digest})

    def refresh_pinned(self, pinned: Iterable[ImageKey]) -> list[ImageKey]:
        """Takes over what is pinned now; gives the pinned keys that are not in memory."""
        self._pinned = frozenset(pinned)
        self._memory.shrink()
        return [key for key in self._pinned if key not in self._memory]

    def forget(self, digests: Collection[str]) -> None:
        """Drops the images of collected digests from memory."""
        self._memory.drop_digests(frozenset(digests))

    def forget_layouts(self, layout_ids: frozenset[str]) -> None:
        """Drops the images for these layouts from memory."""
        self._memory.drop_layouts(layout_ids)

    async def close(self) -> None:
        """Finishes what is being made or written; begins nothing more."""
        self._workers.drain()
        for flight in self._flights.values():
            if not flight.begun.done():
                flight.task.cancel()
        await self.settle()

    async def settle(self) -> None:
        """Returns when nothing is being made or written, unless something new begins."""
        tasks = [flight.task for flight in self._flights.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._spare_task is not None:
            await self._spare_task

    def check_integrity(self) -> None:
        """Asserts that the accounts are right; call it while nothing is held or under way."""
        assert not self._flights
        self._memory.check_integrity()

    async def _begin(self, key: ImageKey) -> MemoryEntry:
        """Joins the work on this image, or starts it; gives the image as soon as it grows.

        A caller that goes away leaves the work going on.
        """
        return await asyncio.shield(self._fly(key, Priority.PULL).begun)

    def _fly(self, key: ImageKey, priority: Priority) -> _Flight:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(priority)
            flight.task = asyncio.create_task(self._make(key, flight))
            flight.task.add_done_callback(_see_failure)
        elif priority is Priority.PULL and flight.priority is not Priority.PULL:
            flight.priority = Priority.PULL
            self._workers.hurry(key)
            if flight.room is not None:
                self._memory.hurry(flight.room)
        return flight

    async def _make(self, key: ImageKey, flight: _Flight) -> None:
        is_ahead = flight.priority is Priority.AHEAD
        build = None
        try:
            with child_span("plan"):
                build = await self._workers.run(
                    key, flight.priority, lambda _: self._builder.plan(key, ahead=is_ahead)
                )
            await self._fill(build, flight)
        except BaseException as failure:
            self._flights.pop(key, None)
            if not flight.begun.done():
                if isinstance(failure, asyncio.CancelledError):
                    failure = Draining("this store is shutting down")
                flight.begun.set_exception(failure)
                flight.begun.exception()  # marks it as seen: those who waited may all have gone
            raise
        finally:
            if build is not None and build.claim is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._calls, self._builder.abandon, build)

    async def _fill(self, build: Build, flight: _Flight) -> None:
        key = build.key
        is_wanted = self._memory.has_room(build.plan.total_bytes)
        entry = self._memory.start(key, build.plan, await self._room(build, flight))
        flight.begun.set_result(entry)
        try:
            with child_span("read") as span:
                await self._workers.run(
                    key, flight.priority, lambda turn: self._builder.fill(build, entry.image, turn)
                )
                if span is not None:
                    span.name = "compile" if build.is_compiled else span.name
                    span.set_attributes(
                        source=build.source, bytes=build.plan.total_bytes, digest=key.digest
                    )
            is_wanted = is_wanted or flight.priority is not Priority.AHEAD
            if is_wanted:
                self._memory.put(entry)
            with child_span("keep"):
                await self._workers.run(key, Priority.KEEP, lambda _: self._builder.keep(build))
            if not is_wanted and flight.priority is not Priority.AHEAD:  # a pull has come meanwhile
                self._memory.put(entry)
        except BaseException as failure:
            entry.image.fail(failure)
            raise
        finally:
            # Whoever asks from now on finds the image in memory, or starts anew.
            self._flights.pop(key, None)
            self._memory.let_go(entry)
        is_idle = self._spare_task is None or self._spare_task.done()
        if is_idle and self._memory.lacks_spare(build.plan.total_bytes):
            spare = self._prepare_spare(key, build.plan.total_bytes)
            self._spare_task = asyncio.create_task(spare)

    async def _prepare_spare(self, key: ImageKey, num_bytes: int) -> None:
        """The next image of this size need not wait for memory: new pages, and pinned ones all the
        more, take as long as compiling does."""
        try:
            spare = await self._workers.run(
                key, Priority.KEEP, lambda _: resident_buffer(num_bytes)
            )
        except ServiceError:  # shutting down
            return
        except Exception:
            logger.warning("there is no memory for a spare buffer", exc_info=True)
            return
        self._memory.add_spare(spare)

    async def _room(self, build: Build, flight: _Flight) -> Room:
        """Room in memory for the image. For pulls there is an end to waiting."""
        if self._num_waiting >= MAX_WAITING:
            raise _no_room()
        room = flight.room = self._memory.ask_room(build.plan.total_bytes, flight.priority)
        self._num_waiting += 1
        try:
            while not room.granted.done():
                is_pull = flight.priority is Priority.PULL
                await asyncio.wait([room.granted], timeout=self._room_seconds)
                if is_pull and not room.granted.done():
                    raise _no_room()
        except BaseException:
            self._memory.return_room(room)
            raise
        finally:
            self._num_waiting -= 1
        return room


def _no_room() -> Overloaded:
    return Overloaded(
        "the store's memory is full of images that are being pulled; try again",
        subject="memory",
        retry_after_s=RETRY_SECONDS,
    )


def _see_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as seen: those who waited may all have gone
