"""The store's use cases, as the transport calls them. Knows no transport; never blocks the loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from adapter_store import layout as layouts
from adapter_store.ahead import Ahead
from adapter_store.catalog import Catalog
from adapter_store.core import (
    AdapterEvent,
    AdapterName,
    AdapterRecord,
    AdapterRef,
    ImageState,
    Layout,
)
from adapter_store.errors import LimitExceeded, PreconditionFailed, StoreError
from adapter_store.image import IMAGE_FORMATS
from adapter_store.images import Images
from adapter_store.metrics import Metrics
from adapter_store.pull import PullMessage, Pulls
from adapter_store.registration import Registrar, Registration
from adapter_store.report import StoreStatus
from adapter_store.sources.upload import FileChunk, Upload
from adapter_store.watch import Watch

P = ParamSpec("P")
T = TypeVar("T")

MAX_UPLOADS = 64


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
        calls: ThreadPoolExecutor,
        fetches: ThreadPoolExecutor,
    ) -> None:
        self._catalog = catalog
        self._registrar = registrar
        self._images = images
        self._pulls = Pulls(images, metrics)
        self._ahead = ahead
        self._watch = watch
        self._metrics = metrics
        self._calls = calls
        self._fetches = fetches
        self._registrations: set[asyncio.Task[tuple[AdapterRecord, int]]] = set()
        self._num_uploads = 0

    # Names

    async def register(self, asked: Registration, source_uri: str) -> tuple[AdapterRecord, int]:
        """See Registrar.register. Goes on to its end when the caller goes away."""
        async with self._registering(asked):
            job = self._fetch(self._registrar.register, asked, source_uri)
            return await self._finish(job)

    async def upload(
        self, asked: Registration, chunks: AsyncIterator[FileChunk]
    ) -> tuple[AdapterRecord, int]:
        """The same for files that arrive in chunks; once all are there, it goes on to its end."""
        async with self._registering(asked):
            if self._num_uploads >= MAX_UPLOADS:
                raise LimitExceeded(f"{MAX_UPLOADS} uploads are in progress; try again later")
            self._num_uploads += 1
            try:
                upload = await self._receive(chunks)
                job = self._fetch(self._registrar.finish_upload, asked, upload)
                return await self._finish(job)
            finally:
                self._num_uploads -= 1

    async def get(self, ref: AdapterRef) -> tuple[AdapterRecord, int]:
        return await self._call(self._catalog.get, ref)

    async def page(
        self, page_size: int, page_token: str, filter_text: str
    ) -> tuple[list[AdapterRecord], str, int]:
        return await self._call(self._catalog.page, page_size, page_token, filter_text)

    async def delete(self, name: AdapterName, version: int) -> int:
        revision = await self._call(self._catalog.remove, name, version)
        await self.refresh_pinned()
        return revision

    async def set_pinned(self, ref: AdapterRef, pinned: bool) -> tuple[AdapterRecord, int]:
        capacity = self._images.memory_counts.capacity_bytes
        found = await self._call(self._catalog.set_pinned, ref, pinned, capacity)
        await self.refresh_pinned()
        return found

    def watch(self, since_revision: int) -> AsyncGenerator[AdapterEvent]:
        return self._watch.follow(since_revision)

    # Layouts and images

    async def register_layout(self, layout: Layout, image_formats: list[int]) -> tuple[str, int]:
        """Gives the layout's id and the newest image format common to both sides."""
        common = set(image_formats) & set(IMAGE_FORMATS)
        if not common:
            raise PreconditionFailed(
                f"layout.image_formats: {sorted(image_formats)} has none of this store's "
                f"{list(IMAGE_FORMATS)}",
                subject="layout.image_formats",
                reason="NO_COMMON_IMAGE_FORMAT",
            )
        layout = dataclasses.replace(layout, image_format=max(common))
        layout_id, is_new = await self._call(self._add_layout, layout)
        if is_new:
            self._ahead.want_layout(layout_id)
            await self.refresh_pinned()
        return layout_id, layout.image_format

    def pull(
        self, digest: str, layout_id: str, offset: int, image_id: str
    ) -> AsyncGenerator[PullMessage]:
        return self._pulls.stream((digest, layout_id), offset, image_id)

    async def refresh_pinned(self) -> None:
        """Brings the memory tier in line with the catalog's pins, and warms what is missing."""
        pinned = await self._call(self._catalog.pinned_keys)
        self._ahead.want(self._images.refresh_pinned(pinned))

    async def status(self) -> StoreStatus:
        return await self._call(self.read_status)

    def read_status(self) -> StoreStatus:
        """Blocking; from any thread."""
        return StoreStatus(
            self._catalog.counts(),
            dataclasses.replace(self._images.memory_counts),
            dataclasses.replace(self._images.disk_counts),
            self._pulls.num_active,
            self._watch.num_watchers,
        )

    @asynccontextmanager
    async def _registering(self, asked: Registration) -> AsyncIterator[None]:
        """Checks first what can be checked first; counts and times the registration."""
        start = time.monotonic()
        result = "failed"
        try:
            await self._call(self._registrar.check, asked)
            yield
            result = "ok"
        except StoreError as error:
            result = error.reason.lower()
            raise
        finally:
            self._metrics.registrations.labels(result).inc()
            self._metrics.registration_seconds.observe(time.monotonic() - start)

    async def _receive(self, chunks: AsyncIterator[FileChunk]) -> Upload:
        upload = await self._call(self._registrar.open_upload)
        try:
            async for chunk in chunks:
                await self._fetch(self._registrar.write_upload, upload, chunk)
        except BaseException:
            self._fetches.submit(self._registrar.abandon_upload, upload)
            raise
        return upload

    async def _finish(
        self, job: asyncio.Future[tuple[AdapterRecord, int]]
    ) -> tuple[AdapterRecord, int]:
        """Waits for a registration. It is not interrupted: its folder may become a blob at any
        moment, and what follows from it must follow."""
        task = asyncio.create_task(self._follow_up(job))
        self._registrations.add(task)
        task.add_done_callback(self._forget_registration)
        return await asyncio.shield(task)

    async def _follow_up(
        self, job: asyncio.Future[tuple[AdapterRecord, int]]
    ) -> tuple[AdapterRecord, int]:
        """What follows from a registration: its images, and the pin that may have moved."""
        record, revision = await job
        self._ahead.want(
            (record.digest, verdict.layout_id)
            for verdict in record.verdicts
            if verdict.state is ImageState.PENDING
        )
        await self.refresh_pinned()
        return record, revision

    def _forget_registration(self, task: asyncio.Task[tuple[AdapterRecord, int]]) -> None:
        self._registrations.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: the caller may have gone

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
        return asyncio.get_running_loop().run_in_executor(self._fetches, function, *args)
