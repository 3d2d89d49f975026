"""Adapters, lists, versions and texts."""

from __future__ import annotations

from adapter_store.catalog.names import Names
from adapter_store.catalog.tables.lookup import VersionsPage
from adapter_store.core import AdapterRecord, Principal
from adapter_store.service.calls import Calls
from servicekit.refs import AdapterName, AdapterRef


class Reading:
    def __init__(self, calls: Calls, names: Names) -> None:
        self._calls = calls
        self._names = names

    async def get(self, caller: Principal, ref: AdapterRef) -> tuple[AdapterRecord, int]:
        return await self._calls.read(caller, self._names.get, ref, caller.tenants)

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
