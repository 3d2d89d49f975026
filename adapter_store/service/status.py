"""The state of this replica and of the catalog."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from adapter_store.catalog.tables.usage import CatalogCounts
from adapter_store.catalog.watch import Watch
from adapter_store.core import ANYONE, Principal
from adapter_store.images.precompile import Precompiler
from adapter_store.images.pull import Pulls
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.images.tiers.disk_tier import TierCounts
from adapter_store.registration.registrar import Registrar
from adapter_store.service.calls import Calls, Places
from adapter_store.service.changes import Changes
from adapter_store.store_status import StoreStatus, Work, WorkDetails
from servicekit.shares import Shares


class StatusReader:
    """`read_catalog` returns the catalog's totals. It blocks, may be called from any thread, and
    raises CatalogUnavailable. `shared` counts the tier that replicas share, if there is one."""

    def __init__(
        self,
        read_catalog: Callable[[], CatalogCounts],
        calls: Calls,
        places: Places,
        changes: Changes,
        registrar: Registrar,
        images: ImageCache,
        precompiler: Precompiler,
        pulls: Pulls,
        watch: Watch,
        shared: TierCounts | None,
    ) -> None:
        self.read_catalog = read_catalog
        self._calls = calls
        self._places = places
        self._changes = changes
        self._registrar = registrar
        self._images = images
        self._precompiler = precompiler
        self._pulls = pulls
        self._watch = watch
        self._shared = shared

    async def read(self, caller: Principal = ANYONE) -> StoreStatus:
        return StoreStatus(await self._calls.read(caller, self.read_catalog), self.read_work())

    def read_work(self) -> Work:
        """Returns the state of this replica. May be called from any thread."""
        return Work(
            dataclasses.replace(self._images.memory_counts),
            dataclasses.replace(self._images.disk_counts),
            self._pulls.num_active,
            self._watch.num_watchers,
            None if self._shared is None else dataclasses.replace(self._shared),
            self._images.num_in_progress,
            self._images.num_waiting_for_room,
            tuple(place.use() for place in self._shared_places()),
            self._images.lock.status(),
        )

    def work_details(self) -> WorkDetails:
        """Returns the work in progress. Call it on the event loop."""
        return WorkDetails(
            self._changes.num_running,
            self._places.uploads.used,
            self._precompiler.num_queued,
            self._images.in_progress(),
            list(self._pulls.active),
        )

    def _shared_places(self) -> Iterator[Shares]:
        places = self._places
        for threads in (places.calls, places.fetches, places.interrupts):
            yield threads.shares
        yield from (places.uploads, places.watches, places.pulled_bytes, places.staged_bytes)
        yield places.ephemeral_bytes
        yield self._registrar.running_fetches
        yield from self._images.places
        if self._pulls.shared_images is not None:
            yield self._pulls.shared_images
