"""Who may call: authorises callers, and audits the calls that change something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inference_svc.core import Action, Principal
from servicekit.auth.audit import Audit, AuditEntry
from servicekit.auth.authenticator import Authenticator, Metadata
from servicekit.errors import ServiceError

LIFE_CYCLE = frozenset({"PauseGeneration", "ResumeGeneration", "Sleep", "Wake", "ResetPrefixCache"})
"""Actions that affect every tenant's requests, for operators of all tenants."""
AUDITED = LIFE_CYCLE | {"LoadAdapter", "UnloadAdapter", "PinAdapter", "UnpinAdapter"}
"""The calls that are audited: RPCs, and calls that only HTTP has."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller as its transport sees it: `metadata` by lower-case names, and the address."""

    metadata: Metadata
    peer: str


@dataclass(frozen=True, slots=True)
class Access:
    """Decides on callers. Lives on the event loop."""

    authenticator: Authenticator[Action]
    audit: Audit[AuditEntry]

    def authenticate(self, caller: Caller) -> Principal:
        """Raises Unauthenticated."""
        return self.authenticator.authenticate(caller.metadata)

    def authorize(self, caller: Caller, action: Action) -> Principal:
        """Raises Unauthenticated or PermissionDenied; the first thing that a call does."""
        return self.authenticator.authorize(caller.metadata, action)

    def authorize_inspection(self, caller: Caller) -> None:
        """Authorises calls that show every tenant's requests."""
        self.authorize(caller, Action.INSPECT).require_all_tenants()

    def authorize_change(self, caller: Caller, method: str) -> Principal:
        """Authorises an operator's call before it is read, and audits it if that fails. Raises
        Unauthenticated or PermissionDenied."""
        entry = self.audit.entry(method, peer=caller.peer)
        try:
            principal = self.authenticate(caller)
            entry.set_caller(principal)
            principal.require(Action.OPERATE)
        except ServiceError as error:
            entry.set_result(error)
            self.audit.write(entry)
            raise
        return principal

    @contextmanager
    def audited(
        self, caller: Caller, method: str, name: str, action: Action = Action.OPERATE
    ) -> Iterator[tuple[Principal, AuditEntry]]:
        """Authorises the caller, and audits how the call ended."""
        assert method in AUDITED
        with self.audit.record(self.audit.entry(method, name, caller.peer)) as entry:
            principal = self.authenticate(caller)
            entry.set_caller(principal)
            principal.require(action)
            if method in LIFE_CYCLE:
                principal.require_all_tenants()
            self.audit.begin(entry)
            yield principal, entry
