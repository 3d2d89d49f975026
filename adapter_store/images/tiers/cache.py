"""The tiers together: an image comes from memory, or is built, at most once at a time.

Lives on the event loop. Builds run in a bounded pool of threads, pulls before precompilation. An
image is read while it is being built, so its first bytes are sent before its last are there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from adapter_store.core import ImageKey, LayoutVerdict, Tenants
from adapter_store.errors import Overloaded
from adapter_store.images.builder import EXPECTED, Build, ImageBuilder, NotPrecompiled
from adapter_store.images.partial_image import PartialImage
from adapter_store.images.tiers.buffers import NotSealed, resident_buffer
from adapter_store.images.tiers.disk_tier import DiskTier, TierCounts
from adapter_store.images.tiers.memory_lock import MemoryLock
from adapter_store.images.tiers.memory_tier import MemoryEntry, MemoryTier, Reservation
from adapter_store.images.worker_pool import Priority, WorkerPool
from servicekit.errors import Draining, ServiceError, ShareExceeded
from servicekit.shares import INTERNAL, FairExecutor, Shares
from servicekit.telemetry.spans import child_span

logger = logging.getLogger(__name__)

MEMORY_WAIT_SECONDS = 5.0
"""How long a pull waits for memory."""
MAX_WAITING = 64
"""How many images may wait for memory at the same time; each keeps its plan meanwhile."""
RETRY_SECONDS = 1.0
MAX_PLANNED = 1024
"""How many plans' verdicts are kept for the accounts that asked for them: if there are more, the
oldest of the tenant that has most of them goes."""


class _Flight:
    """The build of one image, which any number of callers share. `started` returns the image as
    soon as it is being filled."""

    def __init__(self, priority: Priority, account: str) -> None:
        self.priority = priority
        self.accounts = [account]
        """Whose pulls wait for it; the first started it."""
        self.task: asyncio.Task[None]
        self.started: asyncio.Future[MemoryEntry] = asyncio.get_running_loop().create_future()
        self.reservation: Reservation | None = None


class _Plan(NamedTuple):
    """A plan for look-ups of a tenant's adapter by one account."""

    tenant: str
    account: str
    key: ImageKey


class _Verdicts:
    """The verdicts of the last plans, at most MAX_PLANNED: a tenant with many displaces its own."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, OrderedDict[_Plan, LayoutVerdict]] = {}
        self._num_kept = 0

    def get(self, plan: _Plan) -> LayoutVerdict | None:
        kept = self._by_tenant.get(plan.tenant)
        return None if kept is None else kept.get(plan)

    def keep(self, plan: _Plan, verdict: LayoutVerdict) -> None:
        kept = self._by_tenant.setdefault(plan.tenant, OrderedDict())
        self._num_kept += plan not in kept
        kept[plan] = verdict
        if self._num_kept > MAX_PLANNED:
            tenant, largest = max(self._by_tenant.items(), key=lambda item: len(item[1]))
            largest.popitem(last=False)
            self._num_kept -= 1
            if not largest:
                del self._by_tenant[tenant]


class ImageInProgress(NamedTuple):
    """An image being built: its priority, such as "pull" or "precompile", and whether it has got
    memory and is being filled."""

    digest: str
    layout_id: str
    priority: str
    is_filling: bool


class ImageCache:
    """The tiers and the builder behind them. `set_pinned` sets which keys are pinned."""

    def __init__(
        self,
        builder: ImageBuilder,
        disk: DiskTier,
        workers: WorkerPool,
        calls: FairExecutor,
        memory_bytes: int,
        tenant_share: float = 1.0,
        lock: MemoryLock | None = None,
        is_shared: bool = False,
        memory_wait_seconds: float = MEMORY_WAIT_SECONDS,
    ) -> None:
        self._builder = builder
        self._disk = disk
        self._workers = workers
        self._calls = calls
        self.memory_wait_seconds = memory_wait_seconds
        self._pinned: frozenset[ImageKey] = frozenset()
        self.lock = MemoryLock("off") if lock is None else lock
        self._memory = MemoryTier(
            memory_bytes, lambda key: key in self._pinned, self.lock, is_shared=is_shared
        )
        self._flights: dict[ImageKey, _Flight] = {}
        self._checks: set[tuple[str, ImageKey]] = set()
        self._plans: dict[_Plan, asyncio.Task[LayoutVerdict | None]] = {}
        self._planned = _Verdicts()
        self._waiting = Shares("images_waiting_for_memory", MAX_WAITING, tenant_share)
        self._spare_task: asyncio.Task[None] | None = None

    @property
    def memory_counts(self) -> TierCounts:
        return self._memory.counts

    @property
    def disk_counts(self) -> TierCounts:
        return self._disk.counts

    @property
    def places(self) -> tuple[Shares, Shares]:
        """The resources that the builds of images share: the workers, and places of builds without
        memory."""
        return self._workers.turns, self._waiting

    @property
    def num_in_progress(self) -> int:
        """The number of images being built or written, or waiting for it."""
        return len(self._flights)

    @property
    def num_waiting_for_room(self) -> int:
        return self._waiting.used

    def in_progress(self) -> list[ImageInProgress]:
        """Returns the images that `num_in_progress` counts."""
        return [
            ImageInProgress(*key, flight.priority.name.lower(), flight.started.done())
            for key, flight in self._flights.items()
        ]

    @asynccontextmanager
    async def hold(
        self, key: ImageKey, tenants: Tenants = None, account: str = ""
    ) -> AsyncIterator[PartialImage]:
        """Yields the image, complete or being built, and keeps it in memory while the context
        lasts. The account's shares are used.

        Raises NotFound, also if none of these tenants has a record of it; IncompatibleAdapter and
        CorruptData, as ImageBuilder.plan; Overloaded if there is no memory for it. Failures after
        that are raised by PartialImage.wait_part.
        """
        # An image in memory may have been deleted: only the catalog knows.
        loop = asyncio.get_running_loop()
        calls = self._calls.of(account)
        wait_s = await loop.run_in_executor(calls, self._builder.admit, key, tenants)
        if wait_s:
            await asyncio.sleep(wait_s)
            await loop.run_in_executor(calls, self._builder.admit, key, tenants)
        entry = self._memory.find(key)
        while entry is None or entry.is_freed:
            try:
                entry = await self._start(key, account)
            except NotPrecompiled:  # joined a precompilation that gave up: start anew
                continue
        with self._memory.hold(entry):
            yield entry.image

    async def precompile(self, key: ImageKey) -> None:
        """Builds the image before any pull: on disk, and if pinned also in memory.

        Evicts nothing from the disk. Failures are logged, not raised.
        """
        if key in self._memory:
            return
        priority = Priority.PINNED if key in self._pinned else Priority.PRECOMPILE
        flight = self._join(key, priority, INTERNAL)
        try:
            await asyncio.shield(flight.task)
        except NotPrecompiled:
            logger.debug("precompilation skipped", extra={"digest": key.digest})
        except ServiceError as error:
            logger.info("not precompiled", extra={"digest": key.digest, "why": str(error)})
        except Exception:
            logger.exception("precompiling failed", extra={"digest": key.digest})

    async def check(self, key: ImageKey) -> None:
        """Records whether the adapter fits the layout; builds nothing. Failures are logged, not
        raised."""
        job = ("check", key)
        if key in self._memory or key in self._flights or job in self._checks:
            return
        self._checks.add(job)
        try:
            await self._workers.run(job, Priority.PRECOMPILE, lambda _: self._builder.check(key))
        except ServiceError as error:
            logger.info("not checked", extra={"digest": key.digest, "why": str(error)})
        except Exception:
            logger.exception("checking failed", extra={"digest": key.digest})
        finally:
            self._checks.discard(job)

    async def plan(self, key: ImageKey, tenant: str, account: str) -> LayoutVerdict | None:
        """Plans a tenant's adapter for a layout before other work, for an account that waits. It
        records and returns the verdict; None if it cannot plan now. The plan goes on if its callers
        leave.

        Tenants share no plan, and no verdict that is kept here: the time of the call would tell
        them that others have the content.
        """
        job = _Plan(tenant, account, key)
        # A record hides verdicts that were known before it for as long as a build takes. Meanwhile
        # its next look-up finds here what that of new content finds in the catalog.
        if (known := self._planned.get(job)) is not None:
            return known
        planning = self._plans.get(job)
        if planning is None:
            planning = self._plans[job] = asyncio.create_task(self._plan(job))
        await asyncio.wait([planning])
        return None if planning.cancelled() else planning.result()

    async def _plan(self, job: _Plan) -> LayoutVerdict | None:
        found, extra = None, {"digest": job.key.digest}
        try:
            found = await self._workers.run(
                job, Priority.PULL, lambda _: self._builder.plan_verdict(job.key), (job.account,)
            )
        except EXPECTED as error:
            logger.info("not planned", extra=extra | {"why": str(error)})
        except Exception:
            logger.exception("planning failed", extra=extra)
        finally:
            del self._plans[job]
        if found is not None and found.content is not None:
            self._planned.keep(job, found)
        return found

    def set_pinned(self, pinned: Iterable[ImageKey]) -> list[ImageKey]:
        """Replaces the set of pinned keys; returns the keys that are not in memory."""
        self._pinned = frozenset(pinned)
        self._memory.shrink()
        return [key for key in self._pinned if key not in self._memory]

    def drop_digests(self, digests: Collection[str]) -> None:
        """Drops the images of collected digests from memory."""
        self._memory.drop_digests(frozenset(digests))

    def drop_layouts(self, layout_ids: frozenset[str]) -> None:
        """Drops the images for these layouts from memory."""
        self._memory.drop_layouts(layout_ids)

    async def close(self) -> None:
        """Finishes started builds and writes; starts nothing more."""
        self._workers.drain()
        for planning in self._plans.values():
            planning.cancel()
        for flight in self._flights.values():
            if not flight.started.done():
                flight.task.cancel()
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Returns when the builds, writes and plans of this moment have ended."""
        tasks = [flight.task for flight in self._flights.values()]
        await asyncio.gather(*tasks, *self._plans.values(), return_exceptions=True)
        if self._spare_task is not None:
            await self._spare_task

    def check_integrity(self) -> None:
        """Asserts that the accounts are right; call it while nothing is held or being built."""
        assert not self._flights
        self._memory.check_integrity()

    async def _start(self, key: ImageKey, account: str) -> MemoryEntry:
        """Joins the build of this image, or starts it; returns the image as soon as it is being
        filled.

        The build continues if the caller is cancelled.
        """
        return await asyncio.shield(self._join(key, Priority.PULL, account).started)

    def _join(self, key: ImageKey, priority: Priority, account: str) -> _Flight:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(priority, account)
            flight.task = asyncio.create_task(self._build(key, flight))
            flight.task.add_done_callback(_retrieve_failure)
        elif priority is Priority.PULL:
            self._hurry(key, flight, account)
        return flight

    def _hurry(self, key: ImageKey, flight: _Flight, account: str) -> None:
        """A pull of this account waits for the image. Raises ShareExceeded if too many wait for a
        worker."""
        if account not in flight.accounts:
            self._workers.promote(key, account)
            flight.accounts.append(account)
        if flight.priority is not Priority.PULL:
            flight.priority = Priority.PULL
            if flight.reservation is not None:
                self._memory.promote(flight.reservation)

    async def _build(self, key: ImageKey, flight: _Flight) -> None:
        is_precompile = flight.priority is Priority.PRECOMPILE
        build = None
        try:
            with child_span("plan"):
                build = await self._workers.run(
                    key,
                    flight.priority,
                    lambda _: self._builder.plan(key, precompile=is_precompile),
                    flight.accounts,
                )
            await self._fill(build, flight)
        except BaseException as failure:
            self._flights.pop(key, None)
            if not flight.started.done():
                if isinstance(failure, asyncio.CancelledError):
                    failure = Draining("this store is shutting down")
                flight.started.set_exception(failure)
                flight.started.exception()  # marks it as retrieved: maybe no caller waits any more
            raise
        finally:
            if build is not None and build.claim is not None:
                calls = self._calls.of(INTERNAL)
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(calls, self._builder.release_claim, build)

    async def _fill(self, build: Build, flight: _Flight) -> None:
        key = build.key
        is_cached = self._memory.has_space(build.plan.total_bytes)
        entry = self._memory.start(key, build.plan, await self._reserve(build, flight))
        flight.started.set_result(entry)
        try:
            with child_span("read") as span:
                await self._workers.run(
                    key,
                    flight.priority,
                    lambda yield_point: self._builder.fill(build, entry.image, yield_point),
                    flight.accounts,
                )
                if span is not None:
                    span.name = "compile" if build.is_compiled else span.name
                    span.set_attributes(
                        source=build.source, bytes=build.plan.total_bytes, digest=key.digest
                    )
            is_cached |= build.is_ephemeral or flight.priority is not Priority.PRECOMPILE
            if is_cached:
                self._memory.put(entry)
                with suppress(NotSealed):  # before the write: pulls meanwhile are to get its file
                    await entry.image.sealed_file()
            with child_span("keep"):
                await self._workers.run(key, Priority.WRITE, lambda _: self._builder.store(build))
            # A pull may have joined meanwhile.
            if not is_cached and flight.priority is not Priority.PRECOMPILE:
                self._memory.put(entry)
        except BaseException as failure:
            entry.image.fail(failure)
            raise
        finally:
            # From now on callers find the image in memory, or start anew.
            self._flights.pop(key, None)
            self._memory.release(entry)
        is_idle = self._spare_task is None or self._spare_task.done()
        if is_idle and self._memory.lacks_spare(build.plan.total_bytes):
            spare = self._prepare_spare(build.plan.total_bytes)
            self._spare_task = asyncio.create_task(spare)

    async def _prepare_spare(self, num_bytes: int) -> None:
        """Allocates a buffer for the next image of this size: faulting in new pages, and even more
        so pinning them, takes as long as compiling. One at a time."""
        try:
            spare = await self._workers.run(
                "spare", Priority.WRITE, lambda _: resident_buffer(self._memory.pool, num_bytes)
            )
        except ServiceError:  # shutting down
            return
        except Exception:
            logger.warning("no memory for a spare buffer", exc_info=True)
            return
        self._memory.add_spare(spare)

    async def _reserve(self, build: Build, flight: _Flight) -> Reservation:
        """Reserves memory for the image. Pulls wait for a limited time. Raises Overloaded."""
        try:
            place = self._waiting.reserve(flight.accounts[0])
        except ShareExceeded:
            raise _memory_full() from None
        reservation = self._memory.reserve(build.plan.total_bytes, flight.priority)
        flight.reservation = reservation
        try:
            while not reservation.granted.done():
                is_pull = flight.priority is Priority.PULL
                await asyncio.wait([reservation.granted], timeout=self.memory_wait_seconds)
                if is_pull and not reservation.granted.done():
                    raise _memory_full()
        except BaseException:
            self._memory.cancel_reservation(reservation)
            raise
        finally:
            place.release()
        return reservation


def _memory_full() -> Overloaded:
    return Overloaded(
        "the store's memory is full of images that are being pulled; try again",
        subject="memory",
        retry_after_s=RETRY_SECONDS,
    )


def _retrieve_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as retrieved: maybe no caller waits any more
