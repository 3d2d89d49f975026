"""What callers may ask of the store through this service, without a word about transport."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from inference_svc.store.name_cache import AdapterRecord


@dataclass(frozen=True, slots=True)
class Source:
    """Where an adapter's files are. `base_model` "": as the adapter's own config says."""

    uri: str
    base_model: str = ""


class AdapterPage(NamedTuple):
    """`next_token` asks for the next page; "": this is the last."""

    records: list[AdapterRecord]
    next_token: str


class Registry(Protocol):
    """Every method raises StoreUnavailable when no replica answers."""

    async def register(self, name: str, source: Source, token: str | None) -> int:
        """Lets the store fetch and record an adapter on behalf of whoever has this token; it
        decides whether that one may. Returns the revision from which the name points to it.

        Raises PermissionDenied, InvalidRequest (naming the store's field), AdapterUnusable,
        QueueFull for a quota, or another InferenceError.
        """
        ...

    async def list_adapters(
        self, tenants: Collection[str], page_size: int, page_token: str
    ) -> AdapterPage:
        """Current versions of these tenants' adapters (none: of all that we serve), in order of
        tenant and name. Raises InvalidRequest for a token of another list."""
        ...
