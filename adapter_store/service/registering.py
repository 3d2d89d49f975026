"""Registrations: of sources that the store fetches, and of uploads."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from adapter_store.core import Action, Principal
from adapter_store.metrics.registry import Metrics
from adapter_store.registration.rate_limit import RateLimiter
from adapter_store.registration.registrar import Registrar, Registration
from adapter_store.registration.tenant_policy import StorePolicyFile
from adapter_store.service.calls import Calls, Places
from adapter_store.service.changes import Change, Changes
from adapter_store.sources.upload import FileChunk, Upload, upload_stalled
from servicekit.errors import ServiceError
from servicekit.pace import at_pace
from servicekit.shares import INTERNAL
from servicekit.telemetry import spans

T = TypeVar("T")


class Registering:
    def __init__(
        self,
        calls: Calls,
        places: Places,
        changes: Changes,
        registrar: Registrar,
        policies: StorePolicyFile,
        metrics: Metrics,
    ) -> None:
        self._calls = calls
        self._places = places
        self._changes = changes
        self._registrar = registrar
        self._policies = policies
        self._metrics = metrics
        self._rate_limiter = RateLimiter()

    async def register(self, caller: Principal, request: Registration, source_uri: str) -> Change:
        """Starts a registration; see Registrar.register.

        Raises also PermissionDenied, and QuotaExceeded for a tenant that registers too often.
        """
        request = dataclasses.replace(request, created_by=caller.name)
        with self._counted_registration() as count:
            await self._check(caller, request)
            gone = threading.Event()
            job = self._calls.fetch(caller, self._registrar.register, request, source_uri, gone)
            return self._changes.start(job, count, gone)

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
                job = self._calls.fetch(caller, self._registrar.finish_upload, request, upload)
            except BaseException:
                self._abandon(upload)
                raise
            # It may also end before it has begun.
            job.add_done_callback(lambda _: self._abandon(upload))
            return self._changes.start(job, count)

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
        await self._calls.call(caller, self._registrar.check, request)

    async def _receive(
        self, caller: Principal, request: Registration, chunks: AsyncIterator[FileChunk]
    ) -> Upload:
        opening = self._calls.call(caller, self._registrar.open_upload, request)
        try:
            upload = await asyncio.shield(opening)
            writing: asyncio.Future[None] | None = None
            paced = at_pace(chunks, self._places.pace, _size_of, upload_stalled)
            async for chunk in paced:
                # The next chunk arrives while this one is written and hashed.
                if writing is not None:
                    await writing
                writing = self._calls.fetch(caller, self._registrar.write_upload, upload, chunk)
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


def _retrieve_failure(future: asyncio.Future[None]) -> None:
    """Marks a failure as retrieved: the caller may have left before it was waited for."""
    if not future.cancelled():
        future.exception()


def _size_of(chunk: FileChunk) -> int:
    return len(chunk.data)
