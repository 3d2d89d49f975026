"""Keeps this server and its store in touch: the layout registered, the names watched."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Protocol

from inference_svc.adapters.layout import ModelLayout
from inference_svc.errors import InferenceError, StoreUnavailable
from inference_svc.store.directory import Directory, NameEvent

log = logging.getLogger(__name__)

MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.1, 1.0
BEHIND_SECONDS = 2.0
"""Replicas that share a catalog are never further apart; after this long it is another one."""


class HistoryGone(Exception):
    """The watch cannot start where it should: what changed since is not known."""


class Session(Protocol):
    """One replica's catalog. Every method raises StoreUnavailable when it does not answer."""

    @property
    def source(self) -> str: ...
    async def register_layout(self, layout: ModelLayout) -> str: ...
    async def get_revision(self) -> int: ...
    def watch(self, since_revision: int) -> AsyncIterator[NameEvent]:
        """Changes after a revision, in order, and bookmarks. Raises HistoryGone."""
        ...


class WatchedCatalog(Protocol):
    async def connect(self, avoid: Collection[str] = ()) -> Session:
        """To a replica that is none of those to `avoid`, if there is a choice."""
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
        self._avoid: frozenset[str] = frozenset()
        self._behind_since_s: float | None = None

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
        """All of it with one replica: what it says of its catalog holds for its watch."""
        session = await self._catalog.connect(self._avoid)
        layout_id = await session.register_layout(self._layout)
        if layout_id != self._directory.layout_id:
            log.info("the store accepted layout %s", layout_id)
            self._directory.layout_id = layout_id
            self._on_layout(layout_id)
        revision = await session.get_revision()
        if revision < self._directory.revision:
            self._check_behind(session.source, revision)
        if not self._knows_history or revision < self._directory.revision:
            self._directory.reset(revision)
            self._knows_history = True
        self._avoid, self._behind_since_s = frozenset(), None
        self._directory.begin(revision)
        async for event in session.watch(self._directory.revision):
            yield event

    def _check_behind(self, source: str, revision: int) -> None:
        """A replica a moment behind another is no reason to forget what we know, nor is its past
        to be followed: raises StoreUnavailable, for another to be tried. If that goes on, the
        store has another history now, and this returns."""
        now_s = time.monotonic()
        if self._behind_since_s is None:
            self._behind_since_s = now_s
        if now_s - self._behind_since_s < BEHIND_SECONDS:
            self._avoid |= {source}
            raise StoreUnavailable(
                f"{source} is at revision {revision}, behind {self._directory.revision}"
            )
        log.warning("the store went back to revision %d: its history is another", revision)
