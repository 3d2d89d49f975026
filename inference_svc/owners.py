"""Which tenants have used a digest here. Bounded: what nobody asks for is forgotten first."""

from __future__ import annotations

from collections import OrderedDict

MAX_DIGESTS = 100_000


class Owners:
    """What is resident stays its tenants' although its record may be gone from the store."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, set[str]] = OrderedDict()

    def note(self, digest: str, tenant: str) -> None:
        """The store said just now that the tenant has a record of it."""
        self._tenants.setdefault(digest, set()).add(tenant)
        self._tenants.move_to_end(digest)
        if len(self._tenants) > MAX_DIGESTS:
            self._tenants.popitem(last=False)

    def of(self, digest: str) -> frozenset[str]:
        return frozenset(self._tenants.get(digest, ()))
