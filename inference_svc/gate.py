"""The gate that every call passes: whose token it carries, and what that one may do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from inference_svc.access import Action, Principal
from inference_svc.policy import PolicyFile

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

_SCHEME = "bearer"


class Gate:
    """Knows the policy in force at any moment."""

    def __init__(self, policies: PolicyFile) -> None:
        self._policies = policies

    def identify(self, metadata: Metadata) -> Principal:
        """Raises Unauthenticated: no token, or one that the policy does not know."""
        return self._policies.policy.authenticate(bearer_token(metadata))

    def admit(self, metadata: Metadata, action: Action) -> Principal:
        """Raises Unauthenticated, and PermissionDenied if no role of the caller may do this."""
        who = self.identify(metadata)
        who.require(action)
        return who


def bearer_token(metadata: Metadata) -> str | None:
    """The token in the first `authorization`; None: there is none of the scheme."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token if scheme.lower() == _SCHEME else None
    return None
