"""What the store is asked on behalf of a caller, and where the answer may be kept."""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.access import Principal
from inference_svc.errors import AdapterNotFound
from inference_svc.refs import AdapterRef, tenant_of
from inference_svc.store.name_cache import AdapterRecord


@dataclass(frozen=True, slots=True)
class Question:
    """A reference as the store is asked about it. `tenants` are those that it is asked for, None
    where it does not matter."""

    ref: AdapterRef
    tenants: frozenset[str] | None

    @classmethod
    def of(cls, who: Principal, ref: AdapterRef) -> Question:
        """Whoever is for a name's tenant gets the same answer: one question is enough for all."""
        if ref.name and who.is_for(tenant_of(ref.name)):
            return cls(ref, None)
        return cls(ref, who.tenants)

    @property
    def keys(self) -> list[str]:
        """Where the cache may have the answer. A name that the caller is not for has none."""
        if self.tenants is None:
            return [str(self.ref)]
        return [] if self.ref.name else [f"{each}/{self.ref}" for each in sorted(self.tenants)]

    def key_of(self, record: AdapterRecord) -> str:
        """Where the cache keeps this answer. Raises AdapterNotFound for one that is not for those
        who asked."""
        if self.tenants is None:
            return str(self.ref)
        tenant = tenant_of(record.name)
        if tenant not in self.tenants:
            raise AdapterNotFound(f"no adapter {self.ref}", subject="adapter")
        return f"{tenant}/{self.ref}"
