"""Whose signature of which digest counts for whom."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from adapter_store.registration.signatures import (
    Signature,
    check_signature,
    require_signed,
    verify_signature,
)
from adapter_store.registration.tenant_policy import StorePolicy, TenantPolicy, TrustedKey
from servicekit.errors import FailedPrecondition, InvalidArgument, ServiceError

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
KEY, STRANGER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()

POLICY = StorePolicy(
    tenants={"strict": TenantPolicy(require_signature=True)},
    keys={
        "all": TrustedKey("all", PUBLIC, None),
        "theirs": TrustedKey("theirs", PUBLIC, frozenset({"strict"})),
    },
)


def signature(key_id: str = "all", digest: str = DIGEST, key: Ed25519PrivateKey = KEY) -> Signature:
    return Signature(key_id, key.sign(digest.encode()))


def refusal(policy: StorePolicy, tenant: str, given: Signature | None) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        verify_signature(policy, tenant, given, DIGEST)
    return raised.value


@pytest.mark.parametrize(
    ("tenant", "key_id"), [("any", "all"), ("strict", "all"), ("strict", "theirs")]
)
def test_a_trusted_key_is_named(tenant, key_id) -> None:
    check_signature(POLICY, tenant, signature(key_id))
    assert verify_signature(POLICY, tenant, signature(key_id), DIGEST) == key_id


def test_keys_are_as_other_programs_have_them() -> None:
    """Ed25519 as RFC 8032 has it: the public half of this private key is what openssl computes."""
    public = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    assert key.public_key().public_bytes_raw().hex() == public
    policy = StorePolicy(keys={"k": TrustedKey("k", bytes.fromhex(public), None)})
    assert verify_signature(policy, "t", signature("k", key=key), DIGEST) == "k"


def test_without_one() -> None:
    assert verify_signature(POLICY, "any", None, DIGEST) == ""
    error = refusal(POLICY, "strict", None)
    assert (type(error), error.reason) == (FailedPrecondition, "SIGNATURE_REQUIRED")


@pytest.mark.parametrize(
    "given", [signature(digest=OTHER), signature(key=STRANGER), Signature("all", bytes(64))]
)
def test_not_of_this_digest_or_key(given) -> None:
    error = refusal(POLICY, "any", given)
    assert (type(error), error.reason) == (FailedPrecondition, "SIGNATURE_INVALID")
    assert DIGEST in error.message


@pytest.mark.parametrize("length", [0, 63, 65])
def test_what_cannot_be_a_signature(length) -> None:
    error = refusal(POLICY, "any", Signature("all", bytes(length)))
    assert (type(error), error.reason) == (InvalidArgument, "SIGNATURE_INVALID")
    assert error.subject == "signature.value"


def test_a_key_of_others_is_as_unknown_as_none() -> None:
    theirs = refusal(POLICY, "any", signature("theirs"))
    none = refusal(POLICY, "any", signature("nobody"))
    assert theirs.reason == none.reason == "KEY_UNKNOWN"
    assert theirs.message.replace("theirs", "nobody") == none.message


def test_an_open_store_checks_what_it_is_given() -> None:
    """A signature is never taken along unchecked: without a policy no key is known."""
    assert refusal(StorePolicy(), "default", signature()).reason == "KEY_UNKNOWN"
    assert verify_signature(StorePolicy(), "default", None, DIGEST) == ""


def test_a_long_key_name_is_cut() -> None:
    assert len(refusal(POLICY, "any", signature("x" * 10_000)).message) < 200


def test_what_is_on_record_counts() -> None:
    require_signed(POLICY, "strict", signature(), DIGEST)
    require_signed(POLICY, "any", None, DIGEST)
    require_signed(POLICY, "any", signature("gone"), DIGEST)
    for given, reason in (
        (None, "SIGNATURE_REQUIRED"),
        (signature("gone"), "KEY_UNKNOWN"),
        (signature(key=STRANGER), "SIGNATURE_INVALID"),
    ):
        with pytest.raises(FailedPrecondition) as raised:
            require_signed(POLICY, "strict", given, DIGEST)
        assert raised.value.reason == reason
