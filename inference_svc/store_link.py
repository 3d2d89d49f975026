"""Keeps this server and its store in touch: the layout registered, the names watched."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import InferenceError
from inference_svc.names import Directory, NameEvent

log = logging.getLogger(__name__)

MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.1, 1.0


class HistoryGone(Exception):
    """The watch cannot start where it should: what changed since is not known."""


class WatchedCatalog(Protocol):
    """Every method raises StoreUnavailable when the store does not answer."""

    async def register_layout(self, layout: ModelLayout) -> str: ...
    async def get_revision(self) -> int: ...
    def watch(self, since_revision: int) -> AsyncIterator[NameEvent]:
        """Changes after a revision, in order, and bookmarks. Raises HistoryGone."""
        ...


class StoreLink:
    """`on_layout` hears the layout's id when the store accepts it, and again if it changes."""

    def __init__(
        self,
        catalog: WatchedCatalog,
        directory: Directory,
        layout: ModelLayout,
        on_layout: Callable[[str], None],
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._layout = layout
        self._on_layout = on_layout
        self._knows_history = False
        self._is_down = False

    async def run(self) -> None:
        """For ever. Every connection registers the layout: the store may be another one now."""
        delay_s = MIN_DELAY_SECONDS
        while True:
            try:
                async for event in self._connect():
                    self._directory.apply(event)
                    self._is_down, delay_s = False, MIN_DELAY_SECONDS
            except HistoryGone:
                self._knows_history = False
            except InferenceError as error:
                self._say(error)
            except Exception:
                # The base model is served whatever becomes of the store.
                log.exception("the link to the store failed")
            finally:
                self._directory.lost()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, MAX_DELAY_SECONDS)

    def _say(self, error: InferenceError) -> None:
        """Once per outage."""
        if not self._is_down:
            notes = " ".join(getattr(error, "__notes__", ()))
            log.warning("no connection to the store: %s %s", error, notes)
        self._is_down = True

    async def _connect(self) -> AsyncIterator[NameEvent]:
        layout_id = await self._catalog.register_layout(self._layout)
        if layout_id != self._directory.layout_id:
            log.info("the store accepted layout %s", layout_id)
            self._directory.layout_id = layout_id
            self._on_layout(layout_id)
        revision = await self._catalog.get_revision()
        if not self._knows_history or revision < self._directory.revision:
            self._directory.reset(revision)
            self._knows_history = True
        self._directory.begin(revision)
        async for event in self._catalog.watch(self._directory.revision):
            yield event
