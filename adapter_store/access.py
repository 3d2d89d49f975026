"""Who calls, and what they may do. Plain data and pure functions: no transport, no files."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace

from adapter_store.core import Tenants
from servicekit.errors import PermissionDenied
from servicekit.refs import DEFAULT_TENANT


class Role(enum.Enum):
    READER = "reader"
    PUBLISHER = "publisher"
    SERVER = "server"
    ADMIN = "admin"


class Action(enum.Enum):
    """What a call does; every RPC is one of these."""

    READ = "read adapters"
    PULL = "pull images"
    PUBLISH = "change adapters"
    PIN = "pin or unpin adapters"
    REGISTER_LAYOUT = "register layouts"
    STATUS = "read the store's status"
    INSPECT = "debug the store"


_ACTIONS_OF_ROLE: dict[Role, frozenset[Action]] = {
    Role.READER: frozenset({Action.READ, Action.PULL}),
    Role.PUBLISHER: frozenset({Action.READ, Action.PUBLISH}),
    Role.SERVER: frozenset({Action.READ, Action.PULL, Action.REGISTER_LAYOUT, Action.STATUS}),
    Role.ADMIN: frozenset(Action),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. `name` is its token's, "" without a policy; names without a tenant mean
    `home_tenant`."""

    name: str
    roles: frozenset[Role]
    tenants: Tenants
    home_tenant: str = DEFAULT_TENANT

    def on_behalf_of(self, tenants: Collection[str]) -> Principal:
        """The same for these tenants alone, as far as it reaches; none named: for all it has."""
        if not tenants:
            return self
        wanted = frozenset(tenants)
        return replace(self, tenants=wanted if self.tenants is None else wanted & self.tenants)

    def may(self, action: Action) -> bool:
        return any(action in _ACTIONS_OF_ROLE[role] for role in self.roles)

    def require(self, action: Action, subject: str = "") -> None:
        """Raises PermissionDenied unless one of the roles may do this."""
        if not self.may(action):
            roles = ", ".join(sorted(role.value for role in self.roles)) or "none in this store"
            raise PermissionDenied(
                f"{f'{subject}: ' if subject else ''}the token {self.name!r} (roles: {roles}) "
                f"may not {action.value}",
                subject=subject,
            )

    def require_all_tenants(self, what: str) -> None:
        """For what tells of everybody. Raises PermissionDenied."""
        if self.tenants is not None:
            raise PermissionDenied(
                f"the token {self.name!r} is not for all tenants, of which {what}"
            )

    def require_tenant(self, tenant: str, subject: str) -> None:
        """For what would make something of a tenant's: raises PermissionDenied for another's."""
        if self.tenants is not None and tenant not in self.tenants:
            raise PermissionDenied(
                f"{subject}: the token {self.name!r} is not for tenant {tenant!r}", subject=subject
            )


OPEN = Principal("", frozenset(Role), None)
"""Everybody, where there is no policy."""
