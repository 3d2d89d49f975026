"""A directory over a fake catalog, with a virtual clock."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from inference_svc.errors import AdapterNotFound, StoreUnavailable
from inference_svc.store.adapter_resolver import Directory, Servable
from inference_svc.store.types import AdapterRecord, NameEvent
from tests.support.clock import Clock

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64

UPPER = AdapterRecord("default/upper", 1, A, rank=8, base_model="base", revision=5)


@dataclass
class FakeCatalog:
    """Records `lookups` and the tenants of each; `gate` holds answers back."""

    records: dict[str, AdapterRecord] = field(default_factory=lambda: {"default/upper": UPPER})
    revision: int = 5
    down: bool = False
    shared: dict[str, list[AdapterRecord]] = field(default_factory=dict)
    lookups: list[str] = field(default_factory=list)
    lookup_tenants: list[tuple[str, ...]] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def get_adapter(self, ref: str, tenants: Collection[str] = ()) -> AdapterRecord:
        self.lookups.append(ref)
        if self.down:
            raise StoreUnavailable("down")
        found, revision = self._find(ref, tenants), self.revision
        if self.gate is not None:
            await self.gate.wait()
        if found is None:
            raise AdapterNotFound(f"no adapter {ref}")
        return replace(found, revision=revision)

    def _find(self, ref: str, tenants: Collection[str]) -> AdapterRecord | None:
        self.lookup_tenants.append(tuple(sorted(tenants)))
        found = [self.records[ref]] if ref in self.records else []
        found += self.shared.get(ref, [])
        mine = [r for r in found if not tenants or r.name.partition("/")[0] in tenants]
        return mine[0] if mine else None


async def until_lookups(catalog: FakeCatalog, count: int) -> None:
    while len(catalog.lookups) < count:
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 60))  # type: ignore[arg-type]


def make(
    live: bool = True, ahead_s: float = math.inf, **servable: Any
) -> tuple[FakeCatalog, Directory, Clock]:
    catalog, clock = FakeCatalog(), Clock()
    limits = Servable(**{"base_models": ("base", "alias"), "max_lora_rank": 16, **servable})
    directory = Directory(catalog, limits, name_ttl_s=300.0, clock=clock, ahead_s=ahead_s)
    directory.layout_id = "layout"
    if live:
        directory.reset(catalog.revision)
        directory.watch_started(catalog.revision)
        directory.apply(NameEvent(catalog.revision))
    return catalog, directory, clock
