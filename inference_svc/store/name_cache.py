"""What the store has said of adapters, by reference, by name and by digest."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MAX_ENTRIES = 100_000


@dataclass(frozen=True, slots=True)
class LayoutVerdict:
    """Whether an adapter can be served under a layout, and if not, why."""

    servable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """What the store says of one version; `revision` is the catalog's when it said so.
    `create_time_s`, a `time.time()`, is of when the version was recorded."""

    name: str
    version: int
    digest: str
    rank: int
    base_model: str
    revision: int
    verdicts: Mapping[str, LayoutVerdict] = field(default_factory=dict)
    create_time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CachedName:
    """`asked_s` is when the store was asked, on the directory's clock."""

    record: AdapterRecord
    asked_s: float


class NameCache:
    """Canonical reference -> what the store said; the least recently used one goes first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, CachedName] = OrderedDict()
        self._refs_of_name: defaultdict[str, set[str]] = defaultdict(set)
        self._refs_of_digest: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def get(self, ref: str) -> CachedName | None:
        entry = self._entries.get(ref)
        if entry is not None:
            self._entries.move_to_end(ref)
        return entry

    def put(self, ref: str, entry: CachedName) -> None:
        self.remove(ref)
        self._entries[ref] = entry
        self._refs_of_name[entry.record.name].add(ref)
        self._refs_of_digest[entry.record.digest][ref] = None
        if len(self._entries) > MAX_ENTRIES:
            self.remove(next(iter(self._entries)))

    def remove(self, ref: str) -> None:
        entry = self._entries.pop(ref, None)
        if entry is None:
            return
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

    def clear(self) -> None:
        self._entries.clear()
        self._refs_of_name.clear()
        self._refs_of_digest.clear()

    def refs_of(self, digest: str) -> Iterator[str]:
        """Those known for longest first. Use it before anything else changes."""
        return iter(self._refs_of_digest.get(digest, ()))
