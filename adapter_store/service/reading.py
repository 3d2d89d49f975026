"""Adapters, lists, versions and texts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from adapter_store.catalog.names import Names
from adapter_store.catalog.tables.lookup import VersionsPage
from adapter_store.core import AdapterRecord, ImageKey, LayoutVerdict, Principal
from adapter_store.images.tiers.cache import ImageCache
from adapter_store.service.calls import Calls
from servicekit.refs import AdapterName, AdapterRef

PLAN_WAIT_SECONDS = 1.0
"""How long a look-up waits for plans. They go on after that, for the next look-up."""


class Reading:
    def __init__(self, calls: Calls, names: Names, images: ImageCache) -> None:
        self._calls = calls
        self._names = names
        self._images = images

    async def get(self, caller: Principal, ref: AdapterRef) -> tuple[AdapterRecord, int]:
        """Returns an adapter and the catalog's revision. One that may add tokens is planned first,
        where it can be in time: servers take the number from the record."""
        record, revision = await self._calls.read(caller, self._names.get, ref, caller.tenants)
        with suppress(TimeoutError):
            async with asyncio.timeout(PLAN_WAIT_SECONDS):
                while layout_id := record.unplanned_layout:
                    key = ImageKey(record.digest, layout_id)
                    verdict = await self._images.plan(key, record.name.tenant, caller.account)
                    if verdict is None:
                        break
                    # Not read again: the catalog may hide it from this record for a while.
                    record = _with_verdict(record, verdict)
        return record, revision

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


def _with_verdict(record: AdapterRecord, verdict: LayoutVerdict) -> AdapterRecord:
    """Returns the record with this verdict in place of the one under the same layout."""
    verdicts = (
        replace(verdict, servers=each.servers) if each.layout_id == verdict.layout_id else each
        for each in record.verdicts
    )
    return replace(record, verdicts=tuple(verdicts))
