"""Operators' use cases of adapters: load, unload, pin, list, inspect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from inference_svc.api.access import Access, Caller
from inference_svc.core import Action, Principal
from inference_svc.engine.control.status_types import AdapterDetails, ResidentAdapter
from inference_svc.errors import AdapterNotFound, AdapterUnusable
from inference_svc.frontend.engine_calls import EngineCalls
from inference_svc.store.adapter_resolver import Directory
from inference_svc.store.types import Registered, Registry, Source
from servicekit.auth.authenticator import bearer_token
from servicekit.errors import InvalidArgument
from servicekit.refs import parse_ref


class Resident(NamedTuple):
    """A resident adapter, and the names for it that its caller may know. If it is superseded, no
    name points to it any more."""

    adapter: ResidentAdapter
    names: list[str]
    is_superseded: bool


class Inspected(NamedTuple):
    """A resident adapter and its parts."""

    resident: Resident
    details: AdapterDetails


class Loaded(NamedTuple):
    """A resident adapter, and its registration if it was registered for that."""

    resident: Resident
    registered: Registered | None


@dataclass(frozen=True, slots=True)
class Residents:
    """The adapters in memory, as callers may know them. `registry` None: there is no store."""

    calls: EngineCalls
    directory: Directory
    registry: Registry | None
    base_model: str
    access: Access

    async def load(
        self,
        caller: Caller,
        ref: str,
        *,
        pin: bool,
        min_revision: int = 0,
        source: Source | None = None,
        inplace_field: str = "",
        subject: str = "ref",
    ) -> Loaded:
        """Returns once the adapter, as it is at `min_revision` or later, is resident. A source is
        first registered in the store under this name, on behalf of the caller. Who publishes may
        load ahead; a pin, and a source, are an operator's. `subject` is the caller's name of the
        field `ref`, and `inplace_field` of the field that lets a name move to other content,
        if that was not set. Raises AdapterUnusable for a name that would move without it, as
        `Directory.resolve`, and for a load that fails."""
        action = Action.OPERATE if pin or source is not None else Action.LOAD
        with self.access.audited(caller, "LoadAdapter", ref, action) as (principal, entry):
            registered, revision = None, min_revision
            if source is not None:
                if inplace_field:
                    digest = await self._current_digest(principal, ref, subject)
                    source = replace(source, expected_digest=digest)
                try:
                    registered = await self._register(caller, principal, ref, source, subject)
                except AdapterUnusable as error:
                    if error.subject != "expected_digest":
                        raise
                    detail = (
                        f"{ref} has other content; with {inplace_field} this is its next version"
                    )
                    raise AdapterUnusable(f"{subject}: {detail}", subject=subject) from error
                revision = registered.revision
            binding = await self.directory.resolve(principal, ref, revision, subject)
            entry.digest = binding.digest
            account = _pinning_account(principal)
            adapter = await self.calls.load(entry.digest, pin, binding.label, account)
            return Loaded(self._named(principal, adapter), registered)

    async def unload(self, caller: Caller, ref: str, *, subject: str = "ref") -> int:
        """Returns the bytes freed, once they are free."""
        with self.access.audited(caller, "UnloadAdapter", ref) as (principal, entry):
            entry.digest = await self._digest(principal, ref, subject)
            return await self.calls.unload(entry.digest)

    async def pin(self, caller: Caller, ref: str) -> Resident:
        with self.access.audited(caller, "PinAdapter", ref) as (principal, entry):
            entry.digest = await self._digest(principal, ref)
            adapter = await self.calls.pin(entry.digest, _pinning_account(principal))
            return self._named(principal, adapter)

    async def unpin(self, caller: Caller, ref: str) -> Resident:
        with self.access.audited(caller, "UnpinAdapter", ref) as (principal, entry):
            entry.digest = await self._digest(principal, ref)
            adapter = await self.calls.unpin(entry.digest, _pinning_account(principal))
            return self._named(principal, adapter)

    async def list_resident(self, principal: Principal, limit: int = 0) -> list[Resident]:
        """Returns the adapters of the caller's tenants, at most `limit` if that is not 0."""
        # The first `limit` of all may include none of some tenants'.
        adapters = await self.calls.list_resident(limit if principal.tenants is None else 0)
        owned = await self.directory.owned(principal, [adapter.digest for adapter in adapters])
        own = (adapter for adapter in adapters if adapter.digest in owned)
        return [self._named(principal, adapter) for adapter in islice(own, limit or None)]

    async def inspect(self, principal: Principal, ref: str) -> Inspected:
        """Returns the parts of a resident adapter, and the operations that a step launches for it.
        Raises AdapterNotFound, also for an adapter that is not resident."""
        digest = await self._digest(principal, ref)
        details = await self.calls.inspect_adapter(digest, ref)
        return Inspected(self._named(principal, details.adapter), details)

    async def _register(
        self, caller: Caller, principal: Principal, text: str, source: Source, subject: str
    ) -> Registered:
        ref = parse_ref(text, subject, principal.home_tenant)
        if not ref.name or ref.version:
            raise InvalidArgument(f"{subject} must be a name without a version", subject=subject)
        if self.registry is None:
            raise AdapterNotFound("this server has no adapter store", subject=subject)
        source = replace(source, default_base_model=self.base_model)
        return await self.registry.register(str(ref.name), source, bearer_token(caller.metadata))

    async def _current_digest(self, principal: Principal, ref: str, subject: str) -> str:
        """Returns the digest that a name points to, "" if to nothing."""
        try:
            return (await self.directory.resolve(principal, ref, subject=subject)).digest
        except AdapterNotFound:
            return ""

    async def _digest(self, principal: Principal, ref: str, subject: str = "ref") -> str:
        """Returns the digest of a reference; an owner's without a lookup: a resident adapter may be
        deleted from the store."""
        digest = parse_ref(ref, subject, principal.home_tenant).digest
        if digest and self.directory.is_owner(principal, digest):
            return digest
        return (await self.directory.resolve(principal, ref, subject=subject)).digest

    def _named(self, principal: Principal, adapter: ResidentAdapter) -> Resident:
        digest, directory = adapter.digest, self.directory
        names = directory.names_of(principal, digest)
        return Resident(adapter, names, directory.is_superseded(principal, digest))


def _pinning_account(principal: Principal) -> str:
    """Returns whose a pin is, and whose share it counts against: of an operator of all tenants
    nobody's."""
    return "" if principal.tenants is None else principal.account
