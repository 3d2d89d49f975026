"""Tenants' limits and trusted keys in the policy file. Tokens: tests/servicekit/auth."""

from __future__ import annotations

import base64
import hashlib

import pytest

from adapter_store.registration.tenant_policy import (
    UNGUARDED,
    TenantPolicy,
    TrustedKey,
    parse_policy,
)
from servicekit.errors import InvalidSetting
from tests.support.access.policies import FIRST_RELEASE

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
max_versions = 3
[keys.release-2026]
ed25519 = "{KEY}"
tenants = ["team-a"]
[keys.everywhere]
ed25519 = "{KEY}"
tenants = ["*"]
"""


def test_every_part_of_a_policy():
    policy = parse_policy(WHOLE)
    assert [each.name for each in policy.principals.values()] == ["trainer-a", "root"]
    assert policy.tenant("team-a") == TenantPolicy(10, 1000, 60, True)
    assert policy.tenant("team-b") == TenantPolicy(0, 1 << 30, None, False, 3)
    assert policy.tenant("elsewhere") == TenantPolicy(10, 1 << 30)
    assert policy.keys == {
        "release-2026": TrustedKey("release-2026", bytes(range(32)), frozenset({"team-a"})),
        "everywhere": TrustedKey("everywhere", bytes(range(32)), None),
    }


def test_a_file_of_the_first_release_reads_as_it_did():
    policy = parse_policy(FIRST_RELEASE.read_text())
    assert policy.tenant("team-a") == TenantPolicy(10, 1000, 60, True)
    assert policy.tenant("elsewhere") == TenantPolicy(10, 1 << 30)
    assert policy.keys == {
        "release-2026": TrustedKey("release-2026", bytes(range(32)), frozenset({"team-a"}))
    }


def test_without_tables_there_are_no_limits():
    assert parse_policy("").tenant("team-a") == TenantPolicy()
    assert UNGUARDED.tenant("team-a") == TenantPolicy()


BAD = {
    "unknown key of a tenant": ("[tenants.a]\nmax_adapter = 1", "tenants.a.max_adapter"),
    "unknown key of a key": (
        f'[keys.a]\ned25519 = "{KEY}"\ntenants = ["*"]\nx = 1',
        "keys.a.x",
    ),
    "a tenant's name": ("[tenants.A]", "tenants.A"),
    "a number as text": ('[tenants.a]\nmax_adapters = "1"', "tenants.a.max_adapters"),
    "a number as truth": ("[tenants.a]\nmax_adapters = true", "tenants.a.max_adapters"),
    "below zero": ("[tenants.a]\nmax_adapters = -1", "tenants.a.max_adapters"),
    "no rate": (
        "[tenants.a]\nregistrations_per_minute = 0",
        "tenants.a.registrations_per_minute",
    ),
    "no size": ('[tenants.a]\nmax_bytes = "lots"', "tenants.a.max_bytes"),
    "no version": ("[tenants.a]\nmax_versions = 0", "tenants.a.max_versions"),
    "truth as text": ('[tenants.a]\nrequire_signature = "yes"', "tenants.a.require_signature"),
    "a short key": ('[keys.a]\ned25519 = "AAAA"\ntenants = ["*"]', "keys.a.ed25519"),
    "a key that is not base64": ('[keys.a]\ned25519 = "%"\ntenants = ["*"]', "keys.a.ed25519"),
}


@pytest.mark.parametrize(("text", "subject"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named_and_never_quoted(text, subject):
    with pytest.raises(InvalidSetting) as caught:
        parse_policy(text)
    assert caught.value.subject == subject
    assert caught.value.reason == "POLICY_INVALID"
    assert caught.value.message.startswith(subject)


def test_the_smaller_of_what_is_asked_for_and_allowed_is_kept():
    assert [TenantPolicy().keep(requested) for requested in (0, 5)] == [0, 5]
    assert [TenantPolicy(max_versions=3).keep(requested) for requested in (0, 2, 5)] == [3, 2, 3]
