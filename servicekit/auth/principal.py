"""A caller, and the actions that its roles and tenants allow. Plain data: no transport, no
files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from servicekit.errors import PermissionDenied
from servicekit.refs import DEFAULT_TENANT

ActionT = TypeVar("ActionT", bound=Enum)
"""The action of a call; every RPC of a service is one of its actions. Values read "may not
<value>"."""


@dataclass(frozen=True, slots=True)
class Principal(Generic[ActionT]):
    """A caller. `name` is its token's, "" without a policy; `tenants` None means all of them; a
    name without a tenant means `home_tenant`."""

    name: str
    roles: frozenset[str]
    actions: frozenset[ActionT]
    tenants: frozenset[str] | None
    home_tenant: str = DEFAULT_TENANT

    def on_behalf_of(self, tenants: Collection[str]) -> Principal[ActionT]:
        """Returns the same caller confined to these of its tenants; to all it has if none is
        named."""
        if not tenants:
            return self
        named = frozenset(tenants)
        return replace(self, tenants=named if self.tenants is None else named & self.tenants)

    @property
    def account(self) -> str:
        """Whose share of a finite place the caller's work is counted against: its tenant's, or its
        token's own if it is for several tenants. "" without a policy: callers are one."""
        if self.tenants is not None and len(self.tenants) == 1:
            return tenant_account(min(self.tenants))
        return f"token {self.name}" if self.name else ""

    def may(self, action: ActionT) -> bool:
        return action in self.actions

    def require(self, action: ActionT, subject: str = "") -> None:
        """Raises PermissionDenied unless one of the roles allows this."""
        if not self.may(action):
            roles = ", ".join(sorted(self.roles)) or "none in this service"
            raise PermissionDenied(
                f"{f'{subject}: ' if subject else ''}the token {self.name!r} (roles: {roles}) "
                f"may not {action.value}",
                subject=subject,
            )

    def require_all_tenants(self) -> None:
        """Raises PermissionDenied unless the caller is for all tenants, because the answer may be
        about any of them."""
        if self.tenants is not None:
            raise PermissionDenied(
                f"this call covers all tenants, and the token {self.name!r} only some"
            )

    def require_tenant(self, tenant: str, subject: str) -> None:
        """Raises PermissionDenied if the caller is not for this tenant, whose it would change."""
        if not self.is_for(tenant):
            raise PermissionDenied(
                f"{subject}: the token {self.name!r} is not for tenant {tenant!r}", subject=subject
            )

    def is_for(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants


def tenant_account(tenant: str) -> str:
    """Returns the account of callers of this tenant alone."""
    return f"tenant {tenant}"


@dataclass(frozen=True, slots=True)
class Roles(Generic[ActionT]):
    """The roles of a service by the names that the policy file gives them, with the actions that
    each allows.

    `foreign` are the roles of services that share the policy file; they allow nothing here.
    """

    allowed: Mapping[str, frozenset[ActionT]]
    foreign: frozenset[str] = frozenset()

    def principal(
        self,
        name: str,
        roles: Iterable[str],
        tenants: frozenset[str] | None,
        home_tenant: str = DEFAULT_TENANT,
    ) -> Principal[ActionT]:
        own = frozenset(role for role in roles if role in self.allowed)
        actions = frozenset(action for role in own for action in self.allowed[role])
        return Principal(name, own, actions, tenants, home_tenant)

    @property
    def anyone(self) -> Principal[ActionT]:
        """Every caller, where there is no policy."""
        return self.principal("", self.allowed, None)
