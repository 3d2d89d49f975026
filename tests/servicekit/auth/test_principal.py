"""Roles, tenants, and what they allow."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

import pytest

from adapter_store.core import Action as StoreAction
from inference_svc.core import Action as InferenceAction
from servicekit.auth.principal import Principal
from servicekit.errors import PermissionDenied
from tests.support.access.services import INFERENCE, STORE, Service, each_service

ALLOWED: dict[str, set[Enum]] = {
    "reader": {StoreAction.READ, StoreAction.PULL},
    "publisher": {StoreAction.READ, StoreAction.PUBLISH, InferenceAction.LOAD},
    "server": {
        StoreAction.READ,
        StoreAction.PULL,
        StoreAction.REGISTER_LAYOUT,
        StoreAction.STATUS,
    },
    "admin": set(StoreAction),
    "caller": {InferenceAction.GENERATE, InferenceAction.INFO},
    "operator": {
        InferenceAction.OPERATE,
        InferenceAction.LOAD,
        InferenceAction.INSPECT,
        InferenceAction.INFO,
    },
}
"""By role, of both services."""
CASES = [
    pytest.param(service, role, action, id=f"{role}-{action.name}")
    for service in (STORE, INFERENCE)
    for role, action in itertools.product(service.roles.allowed, service.actions)
]
PAIRS = [
    (service, pair)
    for service in (STORE, INFERENCE)
    for pair in itertools.combinations(service.roles.allowed, 2)
]


def principal_of(
    service: Service, *roles: str, tenants: frozenset[str] | None = frozenset({"team-a"})
) -> Principal[Any]:
    return service.roles.principal("someone", roles, tenants, "team-a")


@pytest.mark.parametrize(("service", "role", "action"), CASES)
def test_each_role_and_action(service: Service, role: str, action: Enum) -> None:
    caller = principal_of(service, role)
    assert caller.may(action) == (action in ALLOWED[role])
    if caller.may(action):
        caller.require(action)
    else:
        with pytest.raises(PermissionDenied, match=f"'someone' .roles: {role}. may not"):
            caller.require(action)


@pytest.mark.parametrize(("service", "pair"), PAIRS, ids=lambda value: str(value)[:24])
def test_roles_add_up(service: Service, pair: tuple[str, str]) -> None:
    allowed = ALLOWED[pair[0]] | ALLOWED[pair[1]]
    assert principal_of(service, *pair).actions == allowed & set(service.actions)


def test_services_know_each_others_roles() -> None:
    own, others = set(STORE.roles.allowed), set(INFERENCE.roles.allowed)
    assert own & others == {"publisher"}
    assert STORE.roles.foreign == others - own
    assert INFERENCE.roles.foreign == own - others


@each_service
def test_foreign_roles_allow_nothing(service: Service) -> None:
    caller = principal_of(service, *service.roles.foreign)
    assert not any(caller.may(action) for action in service.actions)
    with pytest.raises(PermissionDenied, match="none in this service"):
        caller.require(next(iter(service.actions)))


def test_tenants() -> None:
    caller = principal_of(STORE)
    assert caller.is_for("team-a")
    assert not caller.is_for("team-b")
    caller.require_tenant("team-a", "name")
    principal_of(STORE, tenants=None).require_tenant("team-b", "name")
    with pytest.raises(PermissionDenied, match=r"name: .* not for tenant 'team-b'") as caught:
        caller.require_tenant("team-b", "name")
    assert caught.value.subject == "name"


def test_all_tenants() -> None:
    principal_of(STORE, tenants=None).require_all_tenants()
    with pytest.raises(
        PermissionDenied, match="covers all tenants, and the token 'someone' only some"
    ):
        principal_of(STORE).require_all_tenants()


@each_service
def test_without_a_policy_everybody_may_everything(service: Service) -> None:
    anyone = service.roles.anyone
    assert all(anyone.may(action) for action in service.actions)
    assert anyone.is_for("any")
    assert anyone.home_tenant == "default"


@pytest.mark.parametrize(
    ("own", "named", "expected"),
    [
        (None, ["team-a"], {"team-a"}),
        ({"team-a", "team-b"}, ["team-b", "team-c"], {"team-b"}),
        ({"team-a"}, ["team-b"], set()),
        ({"team-a"}, [], {"team-a"}),
        (None, [], None),
    ],
)
def test_on_behalf_of_others(own: Any, named: list[str], expected: Any) -> None:
    caller = principal_of(STORE, "server", tenants=None if own is None else frozenset(own))
    narrowed = caller.on_behalf_of(named)
    assert narrowed.tenants == (None if expected is None else frozenset(expected))
    assert (narrowed.name, narrowed.roles) == ("someone", caller.roles)
    assert narrowed.home_tenant == "team-a"
