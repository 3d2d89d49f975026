"""The changes of names, while the watcher's announcement is renewed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from adapter_store.catalog.presence import Presence
from adapter_store.catalog.watch import Watch
from adapter_store.core import Action, AdapterEvent, Principal


class Watching:
    def __init__(self, watch: Watch, presence: Presence) -> None:
        self._watch = watch
        self._presence = presence

    def stream(
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
        with self._presence.watching(announcement_id):
            async with aclosing(events):
                async for event in events:
                    await self._presence.renew(announcement_id)
                    yield event
