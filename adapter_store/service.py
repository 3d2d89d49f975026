"""The store's use cases, as the transport calls them. Knows no transport; never blocks the loop.

The gate has let the caller in for what it asks; here `who` decides which tenants' adapters it is
about. What others have is as if it were not there.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.layout_usage import LayoutUses
from adapter_store.catalog.records import VersionsPage
from adapter_store.catalog.usage import CatalogCounts
from adapter_store.catalog.watch import Watch
from adapter_store.core import (
    Action,
    AdapterEvent,
    AdapterRecord,
    ImageKey,
    ImageState,
    Layout,
    Principal,
    StoreAuditEntry,
)
from adapter_store.errors import LimitExceeded, UploadStalled
from adapter_store.images import layout as layouts
from adapter_store.images.cache import Images
from adapter_store.images.disk_tier import TierCounts
from adapter_store.images.plan import IMAGE_FORMATS
from adapter_store.images.precompile import Ahead
from adapter_store.images.pull import PullMessage, Pulls
from adapter_store.metrics.metrics import Metrics
from adapter_store.registration.policy import StorePolicyFile
from adapter_store.registration.rate_limit import Rates
from adapter_store.registration.registrar import Registrar, Registration
from adapter_store.registration.signatures import Signature, require_signed
from adapter_store.sources.upload import FileChunk, Upload
from adapter_store.store_status import StoreStatus, Work, WorkDetails
from servicekit.errors import FailedPrecondition, ServiceError
from servicekit.refs import AdapterName, AdapterRef
from servicekit.telemetry import spans

P = ParamSpec("P")
T = TypeVar("T")

MAX_UPLOADS = 64
UPLOAD_STALL_SECONDS = 60.0
"""Whoever sends nothing for longer makes room for another upload."""


class Registry:
    """`calls` runs short catalog work, `fetches` registrations; both are bounded."""

    def __init__(
        self,
        catalog: Catalog,
        registrar: Registrar,
        images: Images,
        ahead: Ahead,
        watch: Watch,
        metrics: Metrics,
        policies: StorePolicyFile,
        calls: ThreadPoolExecutor,
        fetches: ThreadPoolExecutor,
    ) -> None:
        self._catalog = catalog
        self._registrar = registrar
        self._images = images
        self.layout_uses = LayoutUses(catalog, calls, self._resume)
        self._pulls = Pulls(images, metrics, self.layout_uses.note)
        self._ahead = ahead
        self._watch = watch
        self._metrics = metrics
        self._policies = policies
        self._rates = Rates()
        self._calls = calls
        self._fetches = fetches
        self.shared_counts: TierCounts | None = None
        """Of the tier that replicas share, where there is one."""
        self._registrations: set[asyncio.Task[tuple[AdapterRecord, int]]] = set()
        self._num_uploads = 0
        self._live_layouts: frozenset[str] = frozenset()

    # Names

    async def register(
        self, who: Principal, asked: Registration, source_uri: str, line: StoreAuditEntry
    ) -> tuple[AdapterRecord, int]:
        """See Registrar.register. Goes on to its end when the caller goes away.

        Raises also PermissionDenied, and QuotaExceeded for a tenant that registers too often.
        """
        asked = dataclasses.replace(asked, created_by=who.name)
        async with self._registering(who, asked):
            job = self._fetch(self._registrar.register, asked, source_uri)
            return await self._finish(job, line)

    async def upload(
        self,
        who: Principal,
        asked: Registration,
        chunks: AsyncIterator[FileChunk],
        line: StoreAuditEntry,
    ) -> tuple[AdapterRecord, int]:
        """The same for files that arrive in chunks; once all are there, it goes on to its end."""
        asked = dataclasses.replace(asked, created_by=who.name)
        async with self._registering(who, asked):
            if self._num_uploads >= MAX_UPLOADS:
                raise LimitExceeded(f"{MAX_UPLOADS} uploads are in progress; try again later")
            self._num_uploads += 1
            try:
                with spans.child_span("receive"):
                    upload = await self._receive(chunks)
                job = self._fetch(self._registrar.finish_upload, asked, upload)
                return await self._finish(job, line)
            finally:
                self._num_uploads -= 1

    async def get(self, who: Principal, ref: AdapterRef) -> tuple[AdapterRecord, int]:
        return await self._call(self._catalog.get, ref, who.tenants)

    async def page(
        self, who: Principal, page_size: int, page_token: str, filter_text: str
    ) -> tuple[list[AdapterRecord], str, int]:
        return await self._call(self._catalog.page, page_size, page_token, filter_text, who.tenants)

    async def delete(self, who: Principal, name: AdapterName, version: int) -> tuple[str, int]:
        """Gives the digest that is gone, and the revision."""
        found = await self._call(self._catalog.remove, name, version, who.tenants)
        await self.refresh_pinned()
        return found

    async def versions(
        self, who: Principal, name: AdapterName, page_size: int, page_token: str
    ) -> VersionsPage:
        return await self._call(self._catalog.versions, name, page_size, page_token, who.tenants)

    async def rollback(
        self,
        who: Principal,
        name: AdapterName,
        version: int,
        if_current_digest: str,
        line: StoreAuditEntry,
    ) -> tuple[AdapterRecord, int]:
        """See Catalog.rollback. Goes on to its end when the caller goes away."""
        policy = self._policies.policy

        def accept(record: AdapterRecord) -> None:
            signed_by, value = record.signed_by, record.signature
            signature = Signature(signed_by, value) if signed_by else None
            require_signed(policy, name.tenant, signature, record.digest)

        job = self._call(
            self._catalog.rollback,
            name,
            version,
            if_current_digest,
            who.tenants,
            policy.tenant(name.tenant).quota,
            accept,
        )
        return await self._finish(job, line)

    async def set_pinned(
        self, who: Principal, ref: AdapterRef, pinned: bool
    ) -> tuple[AdapterRecord, int]:
        capacity = self._images.memory_counts.capacity_bytes
        found = await self._call(self._catalog.set_pinned, ref, pinned, capacity, who.tenants)
        await self.refresh_pinned()
        return found

    def watch(self, who: Principal, since_revision: int) -> AsyncGenerator[AdapterEvent]:
        return self._watch.follow(since_revision, who.tenants)

    # Layouts and images

    async def register_layout(self, layout: Layout, image_formats: list[int]) -> tuple[str, int]:
        """Gives the layout's id and the newest image format common to both sides."""
        common = set(image_formats) & set(IMAGE_FORMATS)
        if not common:
            raise FailedPrecondition(
                f"layout.image_formats: {sorted(image_formats)} has none of this store's "
                f"{list(IMAGE_FORMATS)}",
                subject="layout.image_formats",
                reason="NO_COMMON_IMAGE_FORMAT",
            )
        layout = dataclasses.replace(layout, image_format=max(common))
        layout_id, was_not_live = await self._call(self._add_layout, layout)
        if was_not_live:
            await self._resume(layout_id)
        return layout_id, layout.image_format

    def pull(
        self, who: Principal, digest: str, layout_id: str, offset: int, image_id: str
    ) -> AsyncGenerator[PullMessage]:
        return self._pulls.stream(ImageKey(digest, layout_id), offset, image_id, who.tenants)

    async def compile_ahead(self) -> None:
        """At start: what live layouts miss."""
        await self.refresh_pinned()
        await self.follow_layouts()

    async def follow_layouts(self) -> None:
        """Wants what live layouts miss that this replica has not heard of: others were told of
        them, which may leave compiling ahead to this one."""
        live = frozenset(await self._call(self._catalog.live_layouts))
        for layout_id in sorted(live - self._live_layouts):
            self._ahead.want_layout(layout_id)
        self._live_layouts = live

    async def refresh_pinned(self) -> None:
        """Brings the memory tier in line with the catalog's pins, and warms what is missing."""
        pinned = await self._call(self._catalog.pinned_keys)
        self._ahead.want_pinned(self._images.refresh_pinned(pinned))

    async def status(self) -> StoreStatus:
        return StoreStatus(await self._call(self.read_catalog), self.read_work())

    def read_catalog(self) -> CatalogCounts:
        """Blocking; from any thread. Raises CatalogUnavailable."""
        return self._catalog.counts()

    def read_work(self) -> Work:
        """From any thread."""
        return Work(
            dataclasses.replace(self._images.memory_counts),
            dataclasses.replace(self._images.disk_counts),
            self._pulls.num_active,
            self._watch.num_watchers,
            None if self.shared_counts is None else dataclasses.replace(self.shared_counts),
            self._images.num_in_progress,
            self._images.num_waiting_for_room,
        )

    def work_details(self) -> WorkDetails:
        """On the event loop."""
        return WorkDetails(
            len(self._registrations),
            self._num_uploads,
            self._ahead.num_queued,
            self._images.in_progress(),
            list(self._pulls.active),
        )

    @asynccontextmanager
    async def _registering(self, who: Principal, asked: Registration) -> AsyncIterator[None]:
        """Checks first what can be checked first; counts and times the registration."""
        start = time.monotonic()
        result = "failed"
        try:
            self._authorise(who, asked)
            await self._call(self._registrar.check, asked)
            yield
            result = "ok"
        except ServiceError as error:
            result = error.reason.lower()
            raise
        finally:
            self._metrics.registrations.labels(result).inc()
            self._metrics.registration_seconds.observe(time.monotonic() - start)

    def _authorise(self, who: Principal, asked: Registration) -> None:
        """Before anything is looked up."""
        who.require_tenant(asked.name.tenant, "name")
        if asked.pinned:
            who.require(Action.PIN, "pinned")
        limits = self._policies.policy.tenant(asked.name.tenant)
        self._rates.take(asked.name.tenant, limits.registrations_per_minute)

    async def _receive(self, chunks: AsyncIterator[FileChunk]) -> Upload:
        opening = self._call(self._registrar.open_upload)
        try:
            upload = await asyncio.shield(opening)
            async for chunk in _unless_stalled(chunks):
                await self._fetch(self._registrar.write_upload, upload, chunk)
        except BaseException:
            # The caller may have gone while its folder was being made: it is removed once there.
            opening.add_done_callback(self._abandon)
            raise
        return upload

    def _abandon(self, opening: asyncio.Future[Upload]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._fetches.submit(self._registrar.abandon_upload, opening.result())

    async def _finish(
        self, job: asyncio.Future[tuple[AdapterRecord, int]], line: StoreAuditEntry
    ) -> tuple[AdapterRecord, int]:
        """Waits for a change. It is not interrupted: its folder may become a blob at any
        moment, and what follows from it must follow."""
        line.pending = job
        task = asyncio.create_task(self._follow_up(job))
        self._registrations.add(task)
        task.add_done_callback(self._forget_registration)
        return await asyncio.shield(task)

    async def _follow_up(
        self, job: asyncio.Future[tuple[AdapterRecord, int]]
    ) -> tuple[AdapterRecord, int]:
        """What follows from a new current version: its images, and the pin that may have moved."""
        record, revision = await job
        live = frozenset(await self._call(self._catalog.live_layouts))
        self._ahead.want_current(
            ImageKey(record.digest, verdict.layout_id)
            for verdict in record.verdicts
            if verdict.state is ImageState.PENDING and verdict.layout_id in live
        )
        await self.refresh_pinned()
        return record, revision

    def _forget_registration(self, task: asyncio.Task[tuple[AdapterRecord, int]]) -> None:
        self._registrations.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: the caller may have gone

    async def _resume(self, layout_id: str) -> None:
        """For a layout that is new, or live again."""
        self._live_layouts |= {layout_id}
        self._ahead.want_layout(layout_id)
        await self.refresh_pinned()

    def _add_layout(self, layout: Layout) -> tuple[str, bool]:
        layouts.validate(layout)
        layout_id = layouts.layout_id(layout)
        base_models = (layout.base_model, *layout.aliases)
        return layout_id, self._catalog.add_layout(layout_id, base_models, layouts.to_json(layout))

    def _call(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        assert not kwargs
        return asyncio.get_running_loop().run_in_executor(self._calls, function, *args)

    def _fetch(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        assert not kwargs
        work = partial(function, *args)
        if spans.current_sampled() is not None:  # of which the thread is to know
            work = partial(contextvars.copy_context().run, work)
        return asyncio.get_running_loop().run_in_executor(self._fetches, work)


async def _unless_stalled(chunks: AsyncIterator[FileChunk]) -> AsyncGenerator[FileChunk]:
    """Raises UploadStalled."""
    while True:
        try:
            async with asyncio.timeout(UPLOAD_STALL_SECONDS):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise UploadStalled(
                f"the upload has sent nothing for {UPLOAD_STALL_SECONDS:g} seconds"
            ) from None
        if chunk is None:
            return
        yield chunk
