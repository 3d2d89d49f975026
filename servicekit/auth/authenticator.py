"""Finds a call's principal by the token in its metadata and the policy in force."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeAlias

from servicekit.auth.policy import PolicyFile
from servicekit.auth.principal import ActionT, Principal

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

_SCHEME = "bearer"


class Authenticator(Generic[ActionT]):
    def __init__(self, policies: PolicyFile[Any]) -> None:
        self.policies = policies

    def authenticate(self, metadata: Metadata) -> Principal[ActionT]:
        """Returns the caller. Raises Unauthenticated: no token, or a token that the policy does not
        know."""
        principal: Principal[ActionT] = self.policies.policy.authenticate(bearer_token(metadata))
        return principal

    def authorize(self, metadata: Metadata, action: ActionT) -> Principal[ActionT]:
        """Returns the caller. Raises Unauthenticated, and PermissionDenied if no role of the caller
        allows this."""
        caller = self.authenticate(metadata)
        caller.require(action)
        return caller

    def long_lived(self, metadata: Metadata, action: ActionT) -> LongLivedCall[ActionT]:
        """Authorizes a call that outlives policies. Raises as `authorize`."""
        return LongLivedCall(self, tuple(metadata), action)


class LongLivedCall(Generic[ActionT]):
    """A call during which the policy may change: `revalidate` it from time to time."""

    def __init__(
        self, authenticator: Authenticator[ActionT], metadata: Metadata, action: ActionT
    ) -> None:
        self._authenticator = authenticator
        self._metadata = metadata
        self._action = action
        self._policy = authenticator.policies.policy
        self.caller = authenticator.authorize(metadata, action)

    def revalidate(self) -> bool:
        """Returns whether the caller is for the same tenants as at first. Raises as
        `Authenticator.authorize`."""
        policy = self._authenticator.policies.policy
        if policy is self._policy:
            return True
        now = self._authenticator.authorize(self._metadata, self._action)
        if now.tenants != self.caller.tenants:
            return False
        self._policy = policy
        return True


def bearer_token(metadata: Metadata) -> str | None:
    """Returns the token in the first `authorization`; None if there is none of the scheme."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token if scheme.lower() == _SCHEME else None
    return None
