"""Changes of names that are recorded: delete, prune, rollback, pin."""

from __future__ import annotations

from adapter_store.catalog.names import Names
from adapter_store.core import AdapterRecord, Principal, Pruned, Recorded
from adapter_store.registration.signatures import Signature, require_signed
from adapter_store.registration.tenant_policy import StorePolicyFile
from adapter_store.service.calls import Calls
from adapter_store.service.changes import Change, Changes
from adapter_store.service.warm_images import StandingImages
from servicekit.refs import AdapterName, AdapterRef


class Editing:
    """Pinned images have `pinned_capacity_bytes` of memory."""

    def __init__(
        self,
        calls: Calls,
        names: Names,
        changes: Changes,
        standing: StandingImages,
        policies: StorePolicyFile,
        pinned_capacity_bytes: int,
    ) -> None:
        self._calls = calls
        self._names = names
        self._changes = changes
        self._standing = standing
        self._policies = policies
        self._pinned_capacity_bytes = pinned_capacity_bytes

    async def delete(self, caller: Principal, name: AdapterName, version: int) -> tuple[str, int]:
        """Returns the digest that is gone, and the revision."""
        found = await self._calls.call(caller, self._names.remove, name, version, caller.tenants)
        await self._standing.refresh_pinned()
        return found

    async def prune(self, caller: Principal, name: AdapterName, keep: int) -> Pruned:
        """Deletes old versions of a name; see Names.prune."""
        return await self._calls.call(caller, self._names.prune, name, keep, caller.tenants)

    async def rollback(
        self,
        caller: Principal,
        name: AdapterName,
        version: int,
        if_current_digest: str,
    ) -> Change:
        """Starts to point a name to an earlier version; see Names.rollback."""
        policy = self._policies.policy

        def accept(record: AdapterRecord) -> None:
            signed_by, value = record.signed_by, record.signature
            signature = Signature(signed_by, value) if signed_by else None
            unsigned = record.tokenizer_digest, record.chat_template_digest, record.class_labels
            has_text = any(unsigned)
            require_signed(policy, name.tenant, signature, record.digest, has_text=has_text)

        def roll_back() -> Recorded:
            quota = policy.tenant(name.tenant).quota
            return self._names.rollback(
                name, version, if_current_digest, caller.tenants, quota, accept
            )

        return self._changes.start(self._calls.call(caller, roll_back))

    async def set_pinned(
        self, caller: Principal, ref: AdapterRef, pinned: bool
    ) -> tuple[AdapterRecord, int]:
        capacity = self._pinned_capacity_bytes
        found = await self._calls.call(
            caller, self._names.set_pinned, ref, pinned, capacity, caller.tenants
        )
        await self._standing.refresh_pinned()
        return found
