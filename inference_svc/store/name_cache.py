"""Caches the store's answers, by reference, by name and by digest."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from inference_svc.core import Principal
from inference_svc.errors import AdapterNotFound
from inference_svc.store.types import AdapterRecord
from servicekit.refs import AdapterRef, tenant_of

MAX_ENTRIES = 100_000
MAX_LABELS = 1_000_000
"""Names of labels of all entries together: each may have a thousand."""


@dataclass(frozen=True, slots=True)
class LookupKey:
    """A reference as the store is queried for it, on behalf of `tenants`; None where the answer
    does not depend on them."""

    ref: AdapterRef
    tenants: frozenset[str] | None

    @classmethod
    def of(cls, principal: Principal, ref: AdapterRef) -> LookupKey:
        """All principals of a name's tenant get the same answer and share one lookup."""
        if ref.name and principal.is_for(ref.name.tenant):
            return cls(ref, None)
        return cls(ref, principal.tenants)

    @property
    def cache_keys(self) -> list[str]:
        """The keys under which the answer may be cached; none for another tenant's name."""
        if self.tenants is None:
            return [str(self.ref)]
        return [] if self.ref.name else [f"{each}/{self.ref}" for each in sorted(self.tenants)]

    def cache_key_of(self, record: AdapterRecord) -> str:
        """Returns where this answer is cached. Raises AdapterNotFound for an adapter that these
        tenants may not see."""
        if self.tenants is None:
            return str(self.ref)
        tenant = tenant_of(record.name)
        if tenant not in self.tenants:
            raise AdapterNotFound(f"no adapter {self.ref}", subject="adapter")
        return f"{tenant}/{self.ref}"


@dataclass(frozen=True, slots=True)
class CachedName:
    """`fetched_s` is when the store was queried, on the directory's clock. `is_ahead`: nobody has
    used it yet."""

    record: AdapterRecord
    fetched_s: float
    is_ahead: bool = False


class NameCache:
    """Maps canonical references to records; the least recently used entry is dropped first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, CachedName] = OrderedDict()
        self._refs_of_name: defaultdict[str, set[str]] = defaultdict(set)
        self._refs_of_digest: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._num_labels = 0

    def get(self, ref: str) -> CachedName | None:
        entry = self._entries.get(ref)
        if entry is not None:
            self._entries.move_to_end(ref)
        return entry

    def use(self, ref: str) -> None:
        """Records that an entry, if there is one, is used."""
        entry = self._entries.get(ref)
        if entry is not None and entry.is_ahead:
            self._entries[ref] = replace(entry, is_ahead=False)

    def put(self, ref: str, entry: CachedName) -> None:
        self.remove(ref)
        self._entries[ref] = entry
        self._refs_of_name[entry.record.name].add(ref)
        self._refs_of_digest[entry.record.digest][ref] = None
        self._num_labels += len(entry.record.class_labels)
        while len(self._entries) > MAX_ENTRIES or self._num_labels > MAX_LABELS:
            self.remove(next(iter(self._entries)))

    def remove(self, ref: str) -> None:
        entry = self._entries.pop(ref, None)
        if entry is None:
            return
        self._num_labels -= len(entry.record.class_labels)
        refs_of_name = self._refs_of_name[entry.record.name]
        refs_of_name.discard(ref)
        if not refs_of_name:
            del self._refs_of_name[entry.record.name]
        refs_of_digest = self._refs_of_digest[entry.record.digest]
        del refs_of_digest[ref]
        if not refs_of_digest:
            del self._refs_of_digest[entry.record.digest]

    def remove_name(self, name: str) -> None:
        for ref in list(self._refs_of_name.get(name, ())):
            self.remove(ref)

    def remove_version(self, name: str, version: int) -> None:
        """Removes entries that point to this version of a name: other versions may have its
        bytes."""
        for ref in list(self._refs_of_name.get(name, ())):
            if self._entries[ref].record.version == version:
                self.remove(ref)

    def clear(self) -> None:
        self._entries.clear()
        self._num_labels = 0
        self._refs_of_name.clear()
        self._refs_of_digest.clear()

    def refs_of(self, digest: str) -> Iterator[str]:
        """Iterates over the longest cached ones first; invalid once the cache changes."""
        return iter(self._refs_of_digest.get(digest, ()))
