"""The store's use cases, as the transport calls them. Knows no transport; never blocks the loop.

The caller is authorized for the action already; here `caller` decides which tenants' adapters it
sees. Other tenants' adapters appear not to exist.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.database import Interrupt
from adapter_store.catalog.layout_usage import LayoutUsage
from adapter_store.catalog.lookup import VersionsPage
from adapter_store.catalog.presence import Presence
from adapter_store.catalog.usage import CatalogCounts
from adapter_store.catalog.watch import Watch
from adapter_store.core import (
    ANYONE,
    Action,
    AdapterEvent,
    AdapterRecord,
    Announcement,
    ImageKey,
    ImageState,
    LayoutInfo,
    Principal,
    Pruned,
    Recorded,
)
from adapter_store.errors import LimitExceeded
from adapter_store.images.plan import layout as layouts
from adapter_store.images.plan.announcement import announcement_id, validate_announcement
from adapter_store.images.plan.plan import IMAGE_FORMATS
from adapter_store.images.precompile import Precompiler
from adapter_store.images.pull import Pulls
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.images.tiers.disk_tier import TierCounts
from adapter_store.metrics.metrics import Metrics
from adapter_store.registration.rate_limit import RateLimiter
from adapter_store.registration.registrar import Registrar, Registration
from adapter_store.registration.signatures import Signature, require_signed
from adapter_store.registration.tenant_policy import StorePolicyFile
from adapter_store.sources.upload import (
    FileChunk,
    Upload,
    upload_stalled,
    with_minimum_rate,
)
from adapter_store.store_status import StoreStatus, Work, WorkDetails
from contract.images.header import PullMessage
from contract.images.layouts import Layout
from servicekit.errors import FailedPrecondition, ServiceError
from servicekit.refs import AdapterName, AdapterRef
from servicekit.shares import INTERNAL, FairExecutor, Pace, Shares
from servicekit.telemetry import spans
from servicekit.work_budget import WorkBudget

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Places:
    """The resources that callers share, each tenant up to `share`: threads of short calls, of
    registrations and of ending reads of the database, places for uploads and watches, memory that
    pulls hold, disk for data being received, memory for ephemeral data, and processor time of lists
    and layouts. An upload may not be slower than `pace`."""

    share: float
    calls: FairExecutor
    fetches: FairExecutor
    interrupts: FairExecutor
    uploads: Shares
    watches: Shares
    pulled_bytes: Shares
    staged_bytes: Shares
    ephemeral_bytes: Shares
    list_work: WorkBudget
    pace: Pace


UNANNOUNCED = Announcement(is_renewed=False)
"""The announcement of a server that announces nothing beside its layout."""


class AcceptedLayout(NamedTuple):
    """A registered layout: its id, the newest image format common to both sides, and the id of the
    announcement, by which `watch` renews it; "" if there were too many."""

    layout_id: str
    image_format: int
    announcement_id: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a name that has started. Once its content is here it continues to its end even if
    its caller leaves."""

    recorded: asyncio.Future[Recorded]
    """The record, once it is durable."""
    followed_up: asyncio.Task[Recorded]
    """The same, once the images that the change requires are queued."""
    caller_gone: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Ends the change unless its content has been fetched."""

    async def wait(self) -> Recorded:
        """Raises the reason if it was refused. If it is cancelled, so is a fetch; a fetched adapter
        is recorded."""
        try:
            return await asyncio.shield(self.followed_up)
        except asyncio.CancelledError:
            self.caller_gone.set()
            raise


class StoreService:
    """Runs short catalog work in `places.calls` and registrations in `places.fetches`, each for the
    account of its caller."""

    def __init__(
        self,
        catalog: Catalog,
        registrar: Registrar,
        images: ImageCache,
        precompiler: Precompiler,
        watch: Watch,
        metrics: Metrics,
        policies: StorePolicyFile,
        places: Places,
    ) -> None:
        self._catalog = catalog
        self._registrar = registrar
        self._images = images
        self.layout_usage = LayoutUsage(catalog, places.calls.of(INTERNAL), self._resume)
        self.presence = Presence(catalog, places.calls.of(INTERNAL), self.layout_usage.record)
        self._pulls = Pulls(images, metrics, self.layout_usage.record, places.pulled_bytes)
        self._precompiler = precompiler
        self._watch = watch
        self._metrics = metrics
        self._policies = policies
        self._rate_limiter = RateLimiter()
        self._places = places
        self.shared_counts: TierCounts | None = None
        """The counts of the tier that replicas share, if there is one."""
        self._changes: set[asyncio.Task[Recorded]] = set()
        self._served_layouts: frozenset[str] = frozenset()

    async def close(self) -> None:
        """Ends the service's own background work."""
        await self.presence.close()
        await self.layout_usage.wait_idle()

    # Names

    async def register(self, caller: Principal, request: Registration, source_uri: str) -> Change:
        """Starts a registration; see Registrar.register.

        Raises also PermissionDenied, and QuotaExceeded for a tenant that registers too often.
        """
        request = dataclasses.replace(request, created_by=caller.name)
        with self._counted_registration() as count:
            await self._check(caller, request)
            gone = threading.Event()
            job = self._fetch(caller, self._registrar.register, request, source_uri, gone)
            return self._start(job, count, gone)

    def upload_place(self, caller: Principal) -> AbstractContextManager[object]:
        """Takes one of the places for uploads while the context lasts. Raises ShareExceeded."""
        return self._places.uploads.reserve(caller.account)

    async def in_time(self, first: Awaitable[T]) -> T:
        """Returns the first part of an upload. Raises UploadStalled if it does not come."""
        try:
            async with asyncio.timeout(self._places.pace.stall_seconds):
                return await first
        except TimeoutError:
            raise upload_stalled(self._places.pace) from None

    async def upload(
        self, caller: Principal, request: Registration, chunks: AsyncIterator[FileChunk]
    ) -> Change:
        """Receives files in chunks; once all are there, starts their registration. Needs an
        `upload_place`."""
        request = dataclasses.replace(request, created_by=caller.name)
        with self._counted_registration() as count:
            await self._check(caller, request)
            with spans.child_span("receive"):
                upload = await self._receive(caller, request, chunks)
            try:
                job = self._fetch(caller, self._registrar.finish_upload, request, upload)
            except BaseException:
                self._abandon(upload)
                raise
            # It may also end before it has begun.
            job.add_done_callback(lambda _: self._abandon(upload))
            return self._start(job, count)

    async def get(self, caller: Principal, ref: AdapterRef) -> tuple[AdapterRecord, int]:
        return await self._read(caller, self._catalog.get, ref, caller.tenants)

    async def page(
        self, caller: Principal, page_size: int, page_token: str, filter_text: str
    ) -> tuple[list[AdapterRecord], str, int]:
        return await self._list(
            caller, self._catalog.page, page_size, page_token, filter_text, caller.tenants
        )

    async def delete(self, caller: Principal, name: AdapterName, version: int) -> tuple[str, int]:
        """Returns the digest that is gone, and the revision."""
        found = await self._call(caller, self._catalog.remove, name, version, caller.tenants)
        await self.refresh_pinned()
        return found

    async def prune(self, caller: Principal, name: AdapterName, keep: int) -> Pruned:
        """Deletes old versions of a name; see Catalog.prune."""
        return await self._call(caller, self._catalog.prune, name, keep, caller.tenants)

    async def versions(
        self, caller: Principal, name: AdapterName, page_size: int, page_token: str
    ) -> VersionsPage:
        return await self._list(
            caller, self._catalog.versions, name, page_size, page_token, caller.tenants
        )

    async def rollback(
        self,
        caller: Principal,
        name: AdapterName,
        version: int,
        if_current_digest: str,
    ) -> Change:
        """Starts to point a name to an earlier version; see Catalog.rollback."""
        policy = self._policies.policy

        def accept(record: AdapterRecord) -> None:
            signed_by, value = record.signed_by, record.signature
            signature = Signature(signed_by, value) if signed_by else None
            has_text = bool(record.tokenizer_digest or record.chat_template_digest)
            require_signed(policy, name.tenant, signature, record.digest, has_text=has_text)

        def roll_back() -> Recorded:
            quota = policy.tenant(name.tenant).quota
            return self._catalog.rollback(
                name, version, if_current_digest, caller.tenants, quota, accept
            )

        return self._start(self._call(caller, roll_back))

    async def set_pinned(
        self, caller: Principal, ref: AdapterRef, pinned: bool
    ) -> tuple[AdapterRecord, int]:
        capacity = self._images.memory_counts.capacity_bytes
        found = await self._call(
            caller, self._catalog.set_pinned, ref, pinned, capacity, caller.tenants
        )
        await self.refresh_pinned()
        return found

    def watch(
        self, caller: Principal, since_revision: int, announcement_id: str = ""
    ) -> AsyncGenerator[AdapterEvent]:
        """Yields the changes after a revision, and renews an announcement meanwhile; see
        Watch.stream. Raises also NotFound for an announcement that is not known, and
        PermissionDenied."""
        events = self._watch.stream(since_revision, caller.tenants, caller.account)
        if not announcement_id:
            return events
        caller.require(Action.REGISTER_LAYOUT, "announcement_id")
        return self._renewing(events, announcement_id)

    async def _renewing(
        self, events: AsyncGenerator[AdapterEvent], announcement_id: str
    ) -> AsyncGenerator[AdapterEvent]:
        with self.presence.watching(announcement_id):
            async with aclosing(events):
                async for event in events:
                    await self.presence.renew(announcement_id)
                    yield event

    # Layouts and images

    async def register_layout(
        self,
        layout: Layout,
        image_formats: list[int],
        caller: Principal = ANYONE,
        announcement: Announcement = UNANNOUNCED,
    ) -> AcceptedLayout:
        """Records a layout, and a server's announcement beside it. Raises FailedPrecondition
        NO_COMMON_IMAGE_FORMAT, ShareExceeded, InvalidArgument and LimitExceeded."""
        common = set(image_formats) & set(IMAGE_FORMATS)
        if not common:
            raise FailedPrecondition(
                f"layout.image_formats: {sorted(image_formats)} has none of this store's "
                f"{list(IMAGE_FORMATS)}",
                subject="layout.image_formats",
                reason="NO_COMMON_IMAGE_FORMAT",
            )
        layout = dataclasses.replace(layout, image_format=max(common))
        work, account = self._places.list_work, caller.account
        await work.wait(account)  # a large one takes a second of a processor
        adding = partial(work.run, account, self._add_layout, layout, announcement, account)
        layout_id, announcement_id, is_new = await self._call(caller, adding)
        if is_new:
            await self._resume(layout_id)
        return AcceptedLayout(layout_id, layout.image_format, announcement_id)

    async def layout_page(self, caller: Principal, after: str) -> tuple[list[LayoutInfo], str]:
        """See Catalog.layout_page."""
        return await self._list(caller, self._catalog.layout_page, after)

    async def forget_layout(self, caller: Principal, layout_id: str) -> int:
        """Forgets a layout; returns the number of its images, which are removed from memory, and
        from the disks of all replicas with their next collections. Raises NotFound."""
        num_images = await self._call(caller, self._catalog.forget_layout, layout_id)
        self._served_layouts -= {layout_id}
        await self.refresh_pinned()
        self._images.drop_layouts(frozenset({layout_id}))
        return num_images

    async def text(self, caller: Principal, digest: str) -> bytes:
        """Returns a tokenizer's extract or a chat template; see Catalog.text."""
        return await self._read(caller, self._catalog.text, digest, caller.tenants)

    def pull(
        self, caller: Principal, key: ImageKey, offset: int, image_id: str
    ) -> AsyncGenerator[PullMessage]:
        return self._pulls.stream(key, offset, image_id, caller.tenants, caller.account)

    async def precompile_missing(self) -> None:
        """Queues the images that layouts with servers miss. Call it at start."""
        await self.refresh_pinned()
        await self.queue_new_layouts()

    async def queue_new_layouts(self) -> None:
        """Queues the images of layouts with servers that were registered with other replicas, which
        may leave precompilation to this one."""
        served = frozenset(await self._run(self._catalog.served_layouts))
        for layout_id in sorted(served - self._served_layouts):
            self._precompiler.queue_layout(layout_id)
        self._served_layouts = served

    async def refresh_pinned(self) -> None:
        """Applies the catalog's pins to the memory tier, and queues the images that layouts with
        servers miss."""
        self._apply_pins(*await self._run(self._served_and_pinned))

    def _served_and_pinned(self) -> tuple[frozenset[str], list[ImageKey]]:
        """Returns the layouts with servers, and the pinned images."""
        return frozenset(self._catalog.served_layouts()), self._catalog.pinned_keys()

    def _apply_pins(self, served: frozenset[str], pinned: list[ImageKey]) -> None:
        missing = self._images.set_pinned(pinned)
        self._precompiler.queue_pinned(key for key in missing if key.layout_id in served)

    async def status(self, caller: Principal = ANYONE) -> StoreStatus:
        return StoreStatus(await self._read(caller, self.read_catalog), self.read_work())

    def read_catalog(self) -> CatalogCounts:
        """Returns the catalog's totals. Blocks; may be called from any thread. Raises
        CatalogUnavailable."""
        return self._catalog.counts()

    def read_work(self) -> Work:
        """Returns the state of this replica. May be called from any thread."""
        return Work(
            dataclasses.replace(self._images.memory_counts),
            dataclasses.replace(self._images.disk_counts),
            self._pulls.num_active,
            self._watch.num_watchers,
            None if self.shared_counts is None else dataclasses.replace(self.shared_counts),
            self._images.num_in_progress,
            self._images.num_waiting_for_room,
            tuple(place.use() for place in self._shared_places()),
        )

    def _shared_places(self) -> Iterator[Shares]:
        places = self._places
        for threads in (places.calls, places.fetches, places.interrupts):
            yield threads.shares
        yield from (places.uploads, places.watches, places.pulled_bytes, places.staged_bytes)
        yield places.ephemeral_bytes
        yield self._registrar.running_fetches
        yield from self._images.places

    def work_details(self) -> WorkDetails:
        """Returns the work in progress. Call it on the event loop."""
        return WorkDetails(
            len(self._changes),
            self._places.uploads.used,
            self._precompiler.num_queued,
            self._images.in_progress(),
            list(self._pulls.active),
        )

    @contextmanager
    def _counted_registration(self) -> Iterator[Callable[[BaseException | None], None]]:
        """Counts and times a registration: at once if it does not start, else when the yielded
        function is called with its error."""
        start_s = time.monotonic()

        def count(error: BaseException | None) -> None:
            result = "ok" if error is None else "failed"
            if isinstance(error, ServiceError):
                result = error.reason.lower()
            self._metrics.registrations.labels(result).inc()
            self._metrics.registration_seconds.observe(time.monotonic() - start_s)

        try:
            yield count
        except BaseException as error:
            count(error)
            raise

    async def _check(self, caller: Principal, request: Registration) -> None:
        """Checks the caller's rights and rate, then makes the checks that are possible before the
        fetch."""
        caller.require_tenant(request.name.tenant, "name")
        if request.pinned:
            caller.require(Action.PIN, "pinned")
        limits = self._policies.policy.tenant(request.name.tenant)
        self._rate_limiter.acquire(request.name.tenant, limits.registrations_per_minute)
        await self._call(caller, self._registrar.check, request)

    async def _receive(
        self, caller: Principal, request: Registration, chunks: AsyncIterator[FileChunk]
    ) -> Upload:
        opening = self._call(caller, self._registrar.open_upload, request)
        try:
            upload = await asyncio.shield(opening)
            writing: asyncio.Future[None] | None = None
            async for chunk in with_minimum_rate(chunks, self._places.pace):
                # The next chunk arrives while this one is written and hashed.
                if writing is not None:
                    await writing
                writing = self._fetch(caller, self._registrar.write_upload, upload, chunk)
                writing.add_done_callback(_retrieve_failure)
            if writing is not None:
                await writing
        except BaseException:
            # The caller may leave while its folder is being created: remove it once it is there.
            opening.add_done_callback(self._abandon_opened)
            raise
        return upload

    def _abandon_opened(self, opening: asyncio.Future[Upload]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._abandon(opening.result())

    def _abandon(self, upload: Upload) -> None:
        """Removes the received files, unless that has been done, or the store shuts down: the next
        start sweeps it."""
        if upload.is_open:
            with suppress(RuntimeError):
                self._places.fetches.submit(INTERNAL, self._registrar.abandon_upload, upload)

    def _start(
        self,
        job: asyncio.Future[Recorded],
        count: Callable[[BaseException | None], None] = lambda error: None,
        caller_gone: threading.Event | None = None,
    ) -> Change:
        """Returns the handle of a change, which `caller_gone` ends while it fetches. Later it is
        not interrupted any more: its folder may become a blob at any moment, and its follow-up must
        run. `count` is called when it has ended."""

        def end(task: asyncio.Task[Recorded]) -> None:
            self._changes.discard(task)
            count(asyncio.CancelledError() if task.cancelled() else task.exception())

        task = asyncio.create_task(self._follow_up(job))
        self._changes.add(task)
        task.add_done_callback(end)
        return Change(job, task, caller_gone or threading.Event())

    async def _follow_up(self, job: asyncio.Future[Recorded]) -> Recorded:
        """Queues the images of a new current version, and applies a pin that may have moved."""
        recorded = await job
        record = recorded.record
        # Read together: the caller waits, and compiling begins as soon as something is queued.
        served, pinned = await self._run(self._served_and_pinned)
        self._precompiler.queue_current(
            ImageKey(record.digest, verdict.layout_id)
            for verdict in record.verdicts
            if verdict.state is ImageState.PENDING
            and not verdict.is_hidden
            and verdict.layout_id in served
        )
        self._apply_pins(served, pinned)
        return recorded

    async def _resume(self, layout_id: str) -> None:
        """Queues the images of a layout that is new, or live again."""
        self._served_layouts |= {layout_id}
        self._precompiler.queue_layout(layout_id)
        await self.refresh_pinned()

    def _add_layout(
        self, layout: Layout, announcement: Announcement, account: str
    ) -> tuple[str, str, bool]:
        """Returns the ids of both, and whether images may be missing that were not before."""
        layouts.validate(layout)
        validate_announcement(announcement, layout)
        if layout.image_format > 1:
            # No part of the layout: models of equal shapes have one, and are others all the same.
            announcement = dataclasses.replace(announcement, base_model=layout.base_model)
        body = layouts.to_text(layout)
        layout_id = layouts.text_id(body)
        announced_id = announcement_id(layout_id, announcement)
        was_not_live = self._catalog.add_layout(layout_id, layout.base_model, body, account)
        try:
            is_first = self._catalog.announce(layout_id, announced_id, announcement, account)
        except LimitExceeded as error:  # its servers can serve all the same
            logger.warning("a server is not announced", extra={"why": error.message})
            return layout_id, "", was_not_live
        return layout_id, announced_id, was_not_live or is_first

    def _call(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        assert not kwargs
        calls = self._places.calls.of(caller.account)
        return asyncio.get_running_loop().run_in_executor(calls, function, *args)

    def _run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs the store's own work."""
        calls = self._places.calls.of(INTERNAL)
        return asyncio.get_running_loop().run_in_executor(calls, function)

    def _read(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Calls a function that only reads; its work ends when its caller leaves."""
        assert not kwargs
        interrupt = Interrupt()

        def end(reading: asyncio.Future[T]) -> None:
            if reading.cancelled() and interrupt.set():
                # PostgreSQL is told so over a connection: not on this thread.
                self._places.interrupts.submit(caller.account, interrupt.cancel)

        reading = self._call(caller, partial(interrupt.run, function, *args))
        reading.add_done_callback(end)
        return reading

    async def _list(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Reads as `_read`, within the processor time of the caller's lists."""
        assert not kwargs
        work, account = self._places.list_work, caller.account
        await work.wait(account)
        return await self._read(caller, partial(work.run, account, function, *args))

    async def make_answer(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Makes the answer of a list off the event loop, as part of the processor time of the
        caller's lists."""
        assert not kwargs
        work, account = self._places.list_work, caller.account
        return await self._call(caller, partial(work.run, account, function, *args))

    def _fetch(
        self, caller: Principal, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        assert not kwargs
        work = partial(function, *args)
        if spans.current_sampled() is not None:  # the thread continues the span
            work = partial(contextvars.copy_context().run, work)
        fetches = self._places.fetches.of(caller.account)
        return asyncio.get_running_loop().run_in_executor(fetches, work)


def _retrieve_failure(future: asyncio.Future[None]) -> None:
    """Marks a failure as retrieved: the caller may have left before it was waited for."""
    if not future.cancelled():
        future.exception()
