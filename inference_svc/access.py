"""Who calls, and what they may do. Plain data and pure functions: no transport, no files."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from servicekit.errors import PermissionDenied
from servicekit.refs import DEFAULT_TENANT


class Role(enum.Enum):
    CALLER = "caller"
    OPERATOR = "operator"


class Action(enum.Enum):
    """What a call does; every RPC is one of these."""

    GENERATE = "generate"
    OPERATE = "load, unload, pin or list adapters"
    INSPECT = "debug or profile the server"
    INFO = "read the server's facts"


_ACTIONS_OF_ROLE: dict[Role, frozenset[Action]] = {
    Role.CALLER: frozenset({Action.GENERATE, Action.INFO}),
    Role.OPERATOR: frozenset({Action.OPERATE, Action.INSPECT, Action.INFO}),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. `name` is its token's, "" without a policy; `tenants` None are all. Names without
    a tenant mean `home_tenant`."""

    name: str
    roles: frozenset[Role]
    tenants: frozenset[str] | None
    home_tenant: str = DEFAULT_TENANT

    def may(self, action: Action) -> bool:
        return any(action in _ACTIONS_OF_ROLE[role] for role in self.roles)

    def require(self, action: Action) -> None:
        """Raises PermissionDenied unless one of the roles may do this."""
        if not self.may(action):
            roles = ", ".join(sorted(role.value for role in self.roles)) or "none in this service"
            raise PermissionDenied(
                f"the token {self.name!r} (roles: {roles}) may not {action.value}"
            )

    def require_all_tenants(self, what: str) -> None:
        """For what tells of everybody. Raises PermissionDenied."""
        if self.tenants is not None:
            raise PermissionDenied(
                f"the token {self.name!r} is not for all tenants, of which {what}"
            )

    def is_for(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants


OPEN = Principal("", frozenset(Role), None)
"""Everybody, where there is no policy."""
