"""Keeps images in memory, and compiles them, before a request needs them."""

from __future__ import annotations

from adapter_store.catalog.images import ImageStates
from adapter_store.catalog.layouts import Layouts
from adapter_store.core import AdapterRecord, ImageKey, ImageState
from adapter_store.images.precompile import Precompiler
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.service.calls import Calls


class StandingImages:
    """The images of pinned versions, and of all adapters for layouts with servers."""

    def __init__(
        self,
        calls: Calls,
        layouts: Layouts,
        states: ImageStates,
        images: ImageCache,
        precompiler: Precompiler,
    ) -> None:
        self._calls = calls
        self._layouts = layouts
        self._states = states
        self._images = images
        self._precompiler = precompiler
        self._served: frozenset[str] = frozenset()

    async def precompile_missing(self) -> None:
        """Queues the images that layouts with servers miss. Call it at start."""
        await self.refresh_pinned()
        await self.queue_new_layouts()

    async def queue_new_layouts(self) -> None:
        """Queues the images of layouts with servers that were registered with other replicas, which
        may leave precompilation to this one."""
        served = frozenset(await self._calls.run(self._layouts.served))
        for layout_id in sorted(served - self._served):
            self._precompiler.queue_layout(layout_id)
        self._served = served

    async def refresh_pinned(self) -> None:
        """Applies the catalog's pins to the memory tier, and queues the images that layouts with
        servers miss."""
        self._apply_pins(*await self._calls.run(self._served_and_pinned))

    async def follow_up(self, record: AdapterRecord) -> None:
        """Queues the images of a new current version, and applies a pin that may have moved."""
        # Read together: the caller waits, and compiling begins as soon as something is queued.
        served, pinned = await self._calls.run(self._served_and_pinned)
        self._precompiler.queue_current(
            ImageKey(record.digest, verdict.layout_id)
            for verdict in record.verdicts
            if verdict.state is ImageState.PENDING
            and not verdict.is_hidden
            and verdict.layout_id in served
        )
        self._apply_pins(served, pinned)

    async def resume(self, layout_id: str) -> None:
        """Queues the images of a layout that is new, or live again."""
        self._served |= {layout_id}
        self._precompiler.queue_layout(layout_id)
        await self.refresh_pinned()

    async def drop(self, layout_id: str) -> None:
        """Removes the images of a layout that is forgotten from memory."""
        self._served -= {layout_id}
        await self.refresh_pinned()
        self._images.drop_layouts(frozenset({layout_id}))

    def _served_and_pinned(self) -> tuple[frozenset[str], list[ImageKey]]:
        """Returns the layouts with servers, and the pinned images."""
        return frozenset(self._layouts.served()), self._states.pinned_keys()

    def _apply_pins(self, served: frozenset[str], pinned: list[ImageKey]) -> None:
        missing = self._images.set_pinned(pinned)
        self._precompiler.queue_pinned(key for key in missing if key.layout_id in served)
