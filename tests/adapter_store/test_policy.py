from __future__ import annotations

import base64
import hashlib

import pytest

from adapter_store.access import OPEN, Principal, Role
from adapter_store.policy import Policy, PolicyFile, TenantPolicy, TrustedKey, parse_policy
from servicekit.errors import FailedPrecondition, Unauthenticated

HASH = hashlib.sha256(b"secret").hexdigest()
OTHER_HASH = hashlib.sha256(b"another").hexdigest()
KEY = base64.b64encode(bytes(range(32))).decode()

WHOLE = f"""
[tokens.trainer-a]
sha256 = "{HASH}"
roles = ["publisher", "caller"]
tenants = ["team-a", "shared"]
[tokens.root]
sha256 = "{OTHER_HASH}"
roles = ["admin"]
tenants = ["*"]
[tenants."*"]
max_adapters = 10
max_bytes = "1GiB"
[tenants.team-a]
max_bytes = 1000
registrations_per_minute = 60
require_signature = true
[tenants.team-b]
max_adapters = 0
[keys.release-2026]
ed25519 = "{KEY}"
tenants = ["team-a"]
[keys.everywhere]
ed25519 = "{KEY}"
tenants = ["*"]
"""


def test_every_part_of_a_policy():
    policy = parse_policy(WHOLE)
    assert not policy.is_open
    assert policy.authenticate("secret") == Principal(
        "trainer-a", frozenset({Role.PUBLISHER}), frozenset({"team-a", "shared"}), "team-a"
    )
    assert policy.authenticate("another") == Principal(
        "root", frozenset({Role.ADMIN}), None, "default"
    )
    assert policy.tenant("team-a") == TenantPolicy(10, 1000, 60, True)
    assert policy.tenant("team-b") == TenantPolicy(0, 1 << 30, None, False)
    assert policy.tenant("elsewhere") == TenantPolicy(10, 1 << 30)
    assert policy.keys == {
        "release-2026": TrustedKey("release-2026", bytes(range(32)), frozenset({"team-a"})),
        "everywhere": TrustedKey("everywhere", bytes(range(32)), None),
    }


@pytest.mark.parametrize("token", [None, "", "Secret", "secret ", HASH, "größe", "\udcff"])
def test_other_tokens_are_not_known(token):
    with pytest.raises(Unauthenticated):
        parse_policy(WHOLE).authenticate(token)


def test_an_empty_policy_lets_nobody_in():
    policy = parse_policy("")
    with pytest.raises(Unauthenticated):
        policy.authenticate("secret")
    assert policy.tenant("team-a") == TenantPolicy()


def test_no_policy_lets_everybody_in():
    assert Policy().authenticate(None) is OPEN
    assert Policy().authenticate("anything") is OPEN
    assert Policy().tenant("team-a") == TenantPolicy()


TOKEN = f'[tokens.a]\nsha256 = "{HASH}"\nroles = ["reader"]\ntenants = ["t"]\n'

BAD = {
    "not toml": ("[tokens", ""),
    "unknown table": ("[token.a]", "token"),
    "unknown key of a token": (TOKEN + 'token = "secret-value"', "tokens.a.token"),
    "unknown key of a tenant": ("[tenants.a]\nmax_adapter = 1", "tenants.a.max_adapter"),
    "unknown key of a key": (
        f'[keys.a]\ned25519 = "{KEY}"\ntenants = ["*"]\nx = 1',
        "keys.a.x",
    ),
    "the token itself": (TOKEN.replace(HASH, "secret-value"), "tokens.a.sha256"),
    "no hash": (TOKEN.replace("sha256", "#"), "tokens.a.sha256"),
    "no roles": (TOKEN.replace('"reader"', ""), "tokens.a.roles"),
    "unknown role": (TOKEN.replace("reader", "owner"), "tokens.a.roles.0"),
    "no tenants": (TOKEN.replace('"t"', ""), "tokens.a.tenants"),
    "a tenant that is no name": (TOKEN.replace('"t"', '"t", "T/x"'), "tokens.a.tenants.1"),
    "a token's name": (TOKEN.replace("tokens.a", 'tokens."a b"'), "tokens.a b"),
    "one hash twice": (TOKEN + TOKEN.replace("tokens.a", "tokens.b"), "tokens.b.sha256"),
    "a tenant's name": ("[tenants.A]", "tenants.A"),
    "a number as text": ('[tenants.a]\nmax_adapters = "1"', "tenants.a.max_adapters"),
    "a number as truth": ("[tenants.a]\nmax_adapters = true", "tenants.a.max_adapters"),
    "below zero": ("[tenants.a]\nmax_adapters = -1", "tenants.a.max_adapters"),
    "no rate": (
        "[tenants.a]\nregistrations_per_minute = 0",
        "tenants.a.registrations_per_minute",
    ),
    "no size": ('[tenants.a]\nmax_bytes = "lots"', "tenants.a.max_bytes"),
    "truth as text": ('[tenants.a]\nrequire_signature = "yes"', "tenants.a.require_signature"),
    "a short key": ('[keys.a]\ned25519 = "AAAA"\ntenants = ["*"]', "keys.a.ed25519"),
    "a key that is not base64": ('[keys.a]\ned25519 = "%"\ntenants = ["*"]', "keys.a.ed25519"),
}


@pytest.mark.parametrize(("text", "subject"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named_and_never_quoted(text, subject):
    with pytest.raises(FailedPrecondition) as caught:
        parse_policy(text)
    assert caught.value.subject == subject
    assert caught.value.reason == "POLICY_INVALID"
    assert caught.value.message.startswith(subject)
    assert "secret-value" not in caught.value.message


def test_a_bad_file_at_reload_keeps_the_policy(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(WHOLE)
    file = PolicyFile(path)
    before = file.policy
    path.write_text("tokens = 3")
    with pytest.raises(FailedPrecondition, match=r"policy_file .*policy\.toml: tokens: "):
        file.reload()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FailedPrecondition, match="not UTF-8"):
        file.reload()
    path.unlink()
    with pytest.raises(OSError, match=r"policy\.toml"):
        file.reload()
    assert file.policy is before
    path.write_text("")
    file.reload()
    with pytest.raises(Unauthenticated):
        file.policy.authenticate("secret")


def test_no_file_is_open_for_good():
    file = PolicyFile(None)
    file.reload()
    assert file.policy.is_open
