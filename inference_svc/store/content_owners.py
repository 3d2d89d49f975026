"""Caches which tenants own an adapter's content; bounded, the least recently used is dropped
first."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection

from servicekit.refs import tenant_of

MAX_CLAIMS = 100_000
GRACE_SECONDS = 600.0
"""How long a tenant keeps its claim to resident content after its last name for it changed, as
deleted content stays in the store for a grace period."""


class OwnershipCache:
    """A tenant's claim to a digest is one of its names that the store reported for it.

    A change of the name may mean that the name has no version of that content any more. Such a
    claim is stale: it is valid for the grace period, and longer only if the store confirms it.
    """

    def __init__(self) -> None:
        self._stale_from_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._digests: defaultdict[str, set[str]] = defaultdict(set)

    def confirm(self, digest: str, name: str) -> None:
        """Records that the store has reported a version of this content under the name."""
        self._stale_from_s[digest, name] = math.inf
        self._stale_from_s.move_to_end((digest, name))
        self._names[digest].add(name)
        self._digests[name].add(digest)
        if len(self._stale_from_s) > MAX_CLAIMS:
            self._remove(*next(iter(self._stale_from_s)))

    def mark_stale(self, name: str, now_s: float) -> None:
        for digest in self._digests.get(name, ()):
            key = digest, name
            self._stale_from_s[key] = min(self._stale_from_s[key], now_s)

    def mark_all_stale(self, now_s: float) -> None:
        for key, from_s in self._stale_from_s.items():
            self._stale_from_s[key] = min(from_s, now_s)

    def is_owner(self, tenants: Collection[str], digest: str, now_s: float) -> bool:
        """Returns whether one of these tenants has a valid claim."""
        return any(
            now_s - self._stale_from_s[digest, name] < GRACE_SECONDS
            for name in self._names_of(tenants, digest)
        )

    def needs_revalidation(self, tenants: Collection[str], digest: str, now_s: float) -> bool:
        """Returns whether these tenants have claims, all of which only the store can confirm."""
        claims = self._names_of(tenants, digest)
        return bool(claims) and not self.is_owner(tenants, digest, now_s)

    def remove(self, tenants: Collection[str], digest: str) -> None:
        """Drops the claims of these tenants: the store has denied them."""
        for name in self._names_of(tenants, digest):
            self._remove(digest, name)

    def _names_of(self, tenants: Collection[str], digest: str) -> list[str]:
        return [name for name in self._names.get(digest, ()) if tenant_of(name) in tenants]

    def _remove(self, digest: str, name: str) -> None:
        del self._stale_from_s[digest, name]
        for index, key, value in (
            (self._names, digest, name),
            (self._digests, name, digest),
        ):
            index[key].discard(value)
            if not index[key]:
                del index[key]
