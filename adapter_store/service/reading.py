"""Adapters, lists, versions and texts."""

from __future__ import annotations

import logging

from adapter_store.catalog.names import Names
from adapter_store.catalog.tables.lookup import VersionsPage
from adapter_store.core import AdapterRecord, ImageKey, Principal
from adapter_store.errors import BlobLost, CorruptData, IncompatibleAdapter
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.service.calls import Calls
from servicekit.errors import NotFound
from servicekit.refs import AdapterName, AdapterRef

logger = logging.getLogger(__name__)


class Reading:
    def __init__(self, calls: Calls, names: Names, images: ImageCache) -> None:
        self._calls = calls
        self._names = names
        self._images = images

    async def get(self, caller: Principal, ref: AdapterRef) -> tuple[AdapterRecord, int]:
        """Returns an adapter and the catalog's revision. One that may add tokens is planned first,
        where it can be: servers take the number from the record. Raises also as pulls do, where
        it cannot be now."""
        found = await self._calls.read(caller, self._names.get, ref, caller.tenants)
        record, _ = found
        if layout_id := record.unplanned_layout:
            try:
                await self._images.plan(ImageKey(record.digest, layout_id), caller.account)
            except (IncompatibleAdapter, CorruptData, BlobLost, NotFound) as error:
                logger.info("not planned", extra={"digest": record.digest, "why": str(error)})
            found = await self._calls.read(caller, self._names.get, ref, caller.tenants)
        return found

    async def page(
        self, caller: Principal, page_size: int, page_token: str, filter_text: str
    ) -> tuple[list[AdapterRecord], str, int]:
        return await self._calls.read_list(
            caller, self._names.page, page_size, page_token, filter_text, caller.tenants
        )

    async def versions(
        self, caller: Principal, name: AdapterName, page_size: int, page_token: str
    ) -> VersionsPage:
        return await self._calls.read_list(
            caller, self._names.versions, name, page_size, page_token, caller.tenants
        )

    async def text(self, caller: Principal, digest: str) -> bytes:
        """Returns a tokenizer's extract or a chat template; see Names.text."""
        return await self._calls.read(caller, self._names.text, digest, caller.tenants)
