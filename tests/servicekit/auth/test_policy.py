"""The policy file, as both services read it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from servicekit.auth.policy import PolicyFile
from servicekit.errors import InvalidSetting, Unauthenticated
from tests.support.access.policies import FIRST_RELEASE
from tests.support.access.services import INFERENCE, STORE, Service, each_service

HASH = hashlib.sha256(b"secret").hexdigest()
OTHER_HASH = hashlib.sha256(b"another").hexdigest()
TOKEN = f'[tokens.a]\nsha256 = "{HASH}"\nroles = ["reader"]\ntenants = ["t"]\n'

GOOD = f"""
[tokens.trainer-a]
sha256 = "{HASH}"
roles = ["publisher", "caller"]
tenants = ["team-a", "shared"]
[tokens.root]
sha256 = "{OTHER_HASH}"
roles = ["admin", "operator"]
tenants = ["*"]
"""


@pytest.mark.parametrize(
    ("service", "roles", "roots"),
    [(STORE, ["publisher"], "admin"), (INFERENCE, ["publisher", "caller"], "operator")],
    ids=["adapter_store", "inference_svc"],
)
def test_tokens(service: Service, roles: list[str], roots: str) -> None:
    policy = service.parse(GOOD)
    assert policy.authenticate("secret") == service.roles.principal(
        "trainer-a", roles, frozenset({"team-a", "shared"}), "team-a"
    )
    assert policy.authenticate("another") == service.roles.principal("root", [roots], None)
    assert policy.authenticate("another").home_tenant == "default"


def test_a_file_of_the_first_release_reads_as_it_did(tmp_path: Path) -> None:
    store = PolicyFile(FIRST_RELEASE, STORE.parse, STORE.unguarded).policy
    inference = PolicyFile(FIRST_RELEASE, INFERENCE.parse, INFERENCE.unguarded).policy
    assert len(store.principals) == len(inference.principals) == 4
    trainer, root = store.authenticate("secret"), store.authenticate("another")
    assert (trainer.name, trainer.roles, trainer.home_tenant) == (
        "trainer-a",
        {"publisher"},
        "team-a",
    )
    assert (root.name, root.roles, root.tenants) == ("Root_1", {"reader", "admin"}, None)
    assert inference.authenticate("secret").roles == {"publisher", "caller"}
    assert inference.authenticate("another").roles == {"operator"}
    servers = [each for each in inference.principals.values() if each.name == "inference"]
    assert [(each.roles, each.actions) for each in servers] == [(frozenset(), frozenset())]


@each_service
@pytest.mark.parametrize("token", [None, "", "Secret", "secret ", HASH, "größe", "\udcff"])
def test_other_tokens_are_not_known(service: Service, token: str | None) -> None:
    for text in (GOOD, ""):
        with pytest.raises(Unauthenticated):
            service.parse(text).authenticate(token)
    assert service.unguarded.authenticate(token) == service.roles.anyone


BAD = {
    "not toml": ("[tokens", ""),
    "too deep": ("a = " + "[" * 100_000, ""),
    "unknown table": ("[token.a]", "token"),
    "unknown key of a token": (TOKEN + 'token = "secret-value"', "tokens.a.token"),
    "the token itself": (TOKEN.replace(HASH, "secret-value"), "tokens.a.sha256"),
    "no hash": (TOKEN.replace("sha256", "#"), "tokens.a.sha256"),
    "no roles": (TOKEN.replace('"reader"', ""), "tokens.a.roles"),
    "unknown role": (TOKEN.replace("reader", "secret-value"), "tokens.a.roles.0"),
    "a role that is no text": (TOKEN.replace('"reader"', "1"), "tokens.a.roles.0"),
    "no tenants": (TOKEN.replace('"t"', ""), "tokens.a.tenants"),
    "a tenant that is no name": (TOKEN.replace('"t"', '"t", "T/x"'), "tokens.a.tenants.1"),
    "a token's name": (TOKEN.replace("tokens.a", 'tokens."a b"'), "tokens.a b"),
    "one hash twice": (TOKEN + TOKEN.replace("tokens.a", "tokens.b"), "tokens.b.sha256"),
    "a tenant that is no table": ("[tenants]\na = 1", "tenants.a"),
}


@each_service
@pytest.mark.parametrize(("text", "subject"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named_and_never_quoted(service: Service, text: str, subject: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        service.parse(text)
    assert (caught.value.subject, caught.value.reason) == (subject, "POLICY_INVALID")
    assert caught.value.message.startswith(subject)
    assert "secret-value" not in caught.value.message


@each_service
def test_a_bad_file_at_reload_keeps_the_policy(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(GOOD)
    file = PolicyFile(path, service.parse, service.unguarded)
    before = file.policy
    path.write_text("tokens = 3")
    with pytest.raises(InvalidSetting, match=r"--policy-file .*policy\.toml: tokens: "):
        file.reload()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSetting, match="not UTF-8"):
        file.reload()
    path.write_text(" \n")
    with pytest.raises(InvalidSetting, match="empty"):
        file.reload()
    path.unlink()
    with pytest.raises(OSError, match=r"policy\.toml"):
        file.reload()
    assert file.policy is before
    path.write_text(TOKEN)
    file.reload()
    assert file.policy.authenticate("secret").name == "a"
    assert HASH not in repr(file.policy)
    path.write_text("# nobody")
    file.reload()
    with pytest.raises(Unauthenticated):
        file.policy.authenticate("secret")


@each_service
def test_no_file_is_unguarded_for_good(service: Service) -> None:
    file = PolicyFile(None, service.parse, service.unguarded)
    file.reload()
    assert file.policy is service.unguarded
