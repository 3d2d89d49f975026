"""Which tenants an adapter's content is of. Bounded: what nobody asks for is forgotten first."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection

from inference_svc.refs import tenant_of

MAX_CLAIMS = 100_000
GRACE_SECONDS = 600.0
"""What is resident stays its tenant's for so long after the last name that it is known to have had
for it changed, as what is deleted stays in the store."""


class Owners:
    """A tenant's claim to a digest is one of its names that the store said to have it.

    A change of the name leaves open whether the name still has a version of that content. Such a
    claim is in doubt: it counts through the grace, and longer only if the store affirms it.
    """

    def __init__(self) -> None:
        self._in_doubt_from_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._digests: defaultdict[str, set[str]] = defaultdict(set)

    def note(self, digest: str, name: str) -> None:
        """The store said that the name has a version of this content, and nothing changed since."""
        self._in_doubt_from_s[digest, name] = math.inf
        self._in_doubt_from_s.move_to_end((digest, name))
        self._names[digest].add(name)
        self._digests[name].add(digest)
        if len(self._in_doubt_from_s) > MAX_CLAIMS:
            self._drop(*next(iter(self._in_doubt_from_s)))

    def doubt(self, name: str, now_s: float) -> None:
        """Something about the name has changed."""
        for digest in self._digests.get(name, ()):
            key = digest, name
            self._in_doubt_from_s[key] = min(self._in_doubt_from_s[key], now_s)

    def doubt_all(self, now_s: float) -> None:
        """What has changed is not known."""
        for key, from_s in self._in_doubt_from_s.items():
            self._in_doubt_from_s[key] = min(from_s, now_s)

    def has(self, tenants: Collection[str], digest: str, now_s: float) -> bool:
        """Whether a claim of one of these tenants counts."""
        return any(
            now_s - self._in_doubt_from_s[digest, name] < GRACE_SECONDS
            for name in self._names_of(tenants, digest)
        )

    def is_over(self, tenants: Collection[str], digest: str, now_s: float) -> bool:
        """Whether these tenants had claims of which none counts: the store is to be asked."""
        return bool(self._names_of(tenants, digest)) and not self.has(tenants, digest, now_s)

    def forget(self, tenants: Collection[str], digest: str) -> None:
        """The store said that none of these tenants has this content."""
        for name in self._names_of(tenants, digest):
            self._drop(digest, name)

    def _names_of(self, tenants: Collection[str], digest: str) -> list[str]:
        return [name for name in self._names.get(digest, ()) if tenant_of(name) in tenants]

    def _drop(self, digest: str, name: str) -> None:
        del self._in_doubt_from_s[digest, name]
        for index, key, value in (
            (self._names, digest, name),
            (self._digests, name, digest),
        ):
            index[key].discard(value)
            if not index[key]:
                del index[key]
