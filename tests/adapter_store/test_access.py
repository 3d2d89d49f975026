from __future__ import annotations

import itertools

import pytest

from adapter_store.access import OPEN, Action, Principal, Role
from servicekit.errors import PermissionDenied

ALLOWED = {
    Role.READER: {Action.READ, Action.PULL},
    Role.PUBLISHER: {Action.READ, Action.PUBLISH},
    Role.SERVER: {Action.READ, Action.PULL, Action.REGISTER_LAYOUT, Action.STATUS},
    Role.ADMIN: set(Action),
}


def principal(*roles: Role, tenants=frozenset({"team-a"})) -> Principal:
    return Principal("someone", frozenset(roles), tenants, "team-a")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", Action)
def test_every_role_and_action(role, action):
    who = principal(role)
    assert who.may(action) == (action in ALLOWED[role])
    if who.may(action):
        who.require(action)
    else:
        with pytest.raises(PermissionDenied, match=f"'someone' .roles: {role.value}. may not"):
            who.require(action)


@pytest.mark.parametrize("pair", list(itertools.combinations(Role, 2)))
def test_roles_add_up(pair):
    allowed = {action for action in Action if principal(*pair).may(action)}
    assert allowed == ALLOWED[pair[0]] | ALLOWED[pair[1]]


def test_a_token_without_a_role_of_this_service_may_nothing():
    assert not any(principal().may(action) for action in Action)
    with pytest.raises(PermissionDenied, match="none in this store"):
        principal().require(Action.READ)


def test_tenants():
    principal().require_tenant("team-a", "name")
    principal(tenants=None).require_tenant("team-b", "name")
    with pytest.raises(PermissionDenied, match=r"name: .* not for tenant 'team-b'") as caught:
        principal().require_tenant("team-b", "name")
    assert caught.value.subject == "name"


def test_without_a_policy_everybody_may_everything():
    assert all(OPEN.may(action) for action in Action)
    OPEN.require_tenant("any", "name")
    assert OPEN.home_tenant == "default"


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        (None, ["team-a"], {"team-a"}),
        ({"team-a", "team-b"}, ["team-b", "team-c"], {"team-b"}),
        ({"team-a"}, ["team-b"], set()),
        ({"team-a"}, [], {"team-a"}),
        (None, [], None),
    ],
)
def test_on_behalf_of_others_nobody_reaches_further_than_alone(own, asked, expected):
    who = principal(Role.SERVER, tenants=None if own is None else frozenset(own))
    narrowed = who.on_behalf_of(asked)
    assert narrowed.tenants == (None if expected is None else frozenset(expected))
    assert (narrowed.name, narrowed.roles, narrowed.home_tenant) == ("someone", who.roles, "team-a")
