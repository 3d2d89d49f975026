"""Roles, tenants and the policy file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from inference_svc.access import OPEN, Action, Principal, Role
from inference_svc.gate import Gate
from inference_svc.policy import Policy, PolicyFile, parse_policy
from servicekit.errors import InvalidSetting, PermissionDenied, Unauthenticated

ALLOWED = {
    Role.CALLER: {Action.GENERATE, Action.INFO},
    Role.OPERATOR: {Action.OPERATE, Action.INSPECT, Action.INFO},
}


def principal(*roles: Role) -> Principal:
    return Principal("someone", frozenset(roles), frozenset({"team-a"}), "team-a")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", Action)
def test_every_role_and_action(role: Role, action: Action) -> None:
    who = principal(role)
    assert who.may(action) == (action in ALLOWED[role])
    if who.may(action):
        who.require(action)
    else:
        with pytest.raises(PermissionDenied, match=f"'someone' .roles: {role.value}. may not"):
            who.require(action)


def test_both_roles_do_everything_and_a_role_of_the_store_nothing() -> None:
    assert all(principal(*Role).may(action) for action in Action)
    assert not any(principal().may(action) for action in Action)
    with pytest.raises(PermissionDenied, match="none in this service"):
        principal().require(Action.INFO)


def test_tenants() -> None:
    assert principal().is_for("team-a")
    assert not principal().is_for("team-b")
    assert all(OPEN.is_for(tenant) for tenant in ("team-a", "default"))
    assert all(OPEN.may(action) for action in Action)


# --- the policy file ----------------------------------------------------------------------------

HASH = hashlib.sha256(b"secret").hexdigest()
OTHER_HASH = hashlib.sha256(b"another").hexdigest()
TOKEN = f'[tokens.a]\nsha256 = "{HASH}"\nroles = ["caller"]\ntenants = ["t"]\n'

WHOLE = f"""
[tokens.gateway]
sha256 = "{HASH}"
roles = ["publisher", "caller"]
tenants = ["team-a", "shared"]
[tokens.root]
sha256 = "{OTHER_HASH}"
roles = ["operator", "caller"]
tenants = ["*"]
[tenants."*"]
max_adapters = 10
[keys.release-2026]
ed25519 = "AAAA"
tenants = ["team-a"]
"""


def test_what_concerns_this_service_is_read() -> None:
    policy = parse_policy(WHOLE)
    assert not policy.is_open
    assert policy.authenticate("secret") == Principal(
        "gateway", frozenset({Role.CALLER}), frozenset({"team-a", "shared"}), "team-a"
    )
    assert policy.authenticate("another") == Principal("root", frozenset(Role), None, "default")


@pytest.mark.parametrize("token", [None, "", "Secret", "secret ", HASH, "größe", "\udcff"])
def test_other_tokens_are_not_known(token: str | None) -> None:
    with pytest.raises(Unauthenticated):
        parse_policy(WHOLE).authenticate(token)
    with pytest.raises(Unauthenticated):
        parse_policy("").authenticate(token)
    assert Policy().authenticate(token) is OPEN


BAD = {
    "not toml": ("[tokens", ""),
    "too deep": ("a = " + "[" * 100_000, ""),
    "unknown table": ("[token.a]", "token: unknown key"),
    "unknown key of a token": (TOKEN + 'token = "secret-value"', "tokens.a.token: unknown key"),
    "the token itself": (TOKEN.replace(HASH, "secret-value"), "tokens.a.sha256: "),
    "no hash": (TOKEN.replace("sha256", "#"), "tokens.a.sha256: "),
    "no roles": (TOKEN.replace('"caller"', ""), "tokens.a.roles: "),
    "unknown role": (TOKEN.replace("caller", "owner"), "tokens.a.roles.0: "),
    "no tenants": (TOKEN.replace('"t"', ""), "tokens.a.tenants: "),
    "a tenant that is no name": (TOKEN.replace('"t"', '"t", "T/x"'), "tokens.a.tenants.1: "),
    "a token's name": (TOKEN.replace("tokens.a", 'tokens."a b"'), "tokens.a b: "),
    "one hash twice": (TOKEN + TOKEN.replace("tokens.a", "tokens.b"), "tokens.b.sha256: "),
    "a tenant that is no table": ("[tenants]\na = 1", "tenants.a: "),
}


@pytest.mark.parametrize(("text", "start"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named_and_never_quoted(text: str, start: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_policy(text)
    assert str(caught.value).startswith(start)
    assert "secret-value" not in str(caught.value)


def test_a_bad_file_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(WHOLE)
    file = PolicyFile(path)
    for text in ("[tokens", TOKEN.replace("caller", "owner")):
        path.write_text(text)
        with pytest.raises(InvalidSetting, match=f"policy_file {path}: "):
            file.reload()
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidSetting, match="not UTF-8"):
        file.reload()
    assert file.policy.authenticate("secret").name == "gateway"
    path.write_text(TOKEN)
    file.reload()
    assert file.policy.authenticate("secret").name == "a"
    assert "a" not in repr(file.policy.principals) or HASH not in repr(file.policy)


# --- the gate -----------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    path = tmp_path / "policy.toml"
    path.write_text(TOKEN)
    return Gate(PolicyFile(path))


@pytest.mark.parametrize("value", ["Bearer secret", "bearer secret", "BEARER secret"])
def test_the_scheme_is_not_case_sensitive(gate: Gate, value: str) -> None:
    metadata = [("user-agent", "x"), ("authorization", value)]
    assert gate.admit(metadata, Action.GENERATE).name == "a"
    with pytest.raises(PermissionDenied):
        gate.admit(metadata, Action.OPERATE)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "secret")],
        [("authorization", "Basic secret")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer  secret")],
        [("authorization", "Bearer other"), ("authorization", "Bearer secret")],
        [("authorization-bin", b"Bearer secret")],
    ],
    ids=str,
)
def test_everything_else_shows_no_token(gate: Gate, metadata: list[tuple[str, str]]) -> None:
    with pytest.raises(Unauthenticated):
        gate.identify(metadata)
