"""The store as the event loop sees it: its catalog, the link to it, an eye on its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from inference_svc.adapters.layout import ModelLayout
from inference_svc.store.client import CatalogClient
from inference_svc.store.credentials import StoreAccess
from inference_svc.store.directory import Directory
from inference_svc.store.replica_monitor import ReplicaKeeper
from inference_svc.store.replicas import Replicas
from inference_svc.store.watch import StoreLink


class StoreSite:
    """`catalog` may be used until `close`. `replicas` is shared with whoever pulls images."""

    def __init__(self, addresses: Sequence[str], replicas: Replicas, access: StoreAccess) -> None:
        self.catalog = CatalogClient(replicas, access)
        self._keeper = ReplicaKeeper(replicas, addresses, self.catalog.probe)
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self, directory: Directory, layout: ModelLayout, on_layout: Callable[[str], None]
    ) -> None:
        """`directory` is kept true from now on. See StoreLink for `on_layout`."""
        link = StoreLink(self.catalog, directory, layout, on_layout)
        self._tasks = [asyncio.create_task(self._keeper.run()), asyncio.create_task(link.run())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.catalog.close()
