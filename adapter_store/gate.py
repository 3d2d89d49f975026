"""The gate that every call passes: whose token it carries, and what that one may do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from adapter_store.access import Action, Principal
from adapter_store.errors import RevisionTooOld
from adapter_store.policy import PolicyFile

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

_SCHEME = "bearer"


class Gate:
    """Knows the policy in force at any moment."""

    def __init__(self, policies: PolicyFile) -> None:
        self._policies = policies

    def identify(self, metadata: Metadata) -> Principal:
        """Raises Unauthenticated: no token, or one that the policy does not know."""
        return self._policies.policy.authenticate(_bearer_token(metadata))

    def admit(self, metadata: Metadata, action: Action) -> Principal:
        """Raises Unauthenticated, and PermissionDenied if no role of the caller may do this."""
        who = self.identify(metadata)
        who.require(action)
        return who

    def stay(self, metadata: Metadata, action: Action) -> Stay:
        return Stay(self, self._policies, tuple(metadata), action)


class Stay:
    """A call that lasts: `renew` it from time to time, for the policy may change meanwhile."""

    def __init__(
        self, gate: Gate, policies: PolicyFile, metadata: Metadata, action: Action
    ) -> None:
        self._gate = gate
        self._policies = policies
        self._metadata = metadata
        self._action = action
        self._policy = policies.policy
        self.who = gate.admit(metadata, action)

    def renew(self) -> None:
        """Raises as Gate.admit, and RevisionTooOld if the caller may see other tenants now: what
        was passed over until now is found by listing again only."""
        policy = self._policies.policy
        if policy is self._policy:
            return
        if self._gate.admit(self._metadata, self._action).tenants != self.who.tenants:
            raise RevisionTooOld(
                "since_revision: this token is for other tenants now; list again",
                subject="since_revision",
            )
        self._policy = policy


def _bearer_token(metadata: Metadata) -> str | None:
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token if scheme.lower() == _SCHEME else None
    return None
