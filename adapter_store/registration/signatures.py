"""Signatures: Ed25519 over the ASCII bytes of a digest, "sha256:<hex>", by a key the policy trusts.

The digest is computed by this store from the content, never sent by a caller. No private key is
ever needed here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from adapter_store.registration.tenant_policy import StorePolicy, TrustedKey
from servicekit.errors import FailedPrecondition, InvalidArgument

SIGNATURE_BYTES = 64
_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature by the key that the policy names `key_id`."""

    key_id: str
    value: bytes = field(repr=False)


def check_signature(policy: StorePolicy, tenant: str, signature: Signature | None) -> None:
    """Makes the checks that are possible before the digest is known.

    Raises FailedPrecondition (SIGNATURE_REQUIRED; KEY_UNKNOWN, also for a key that is not trusted
    for this tenant) and InvalidArgument (SIGNATURE_INVALID: not of a signature's length).
    """
    if signature is None:
        if policy.tenant(tenant).require_signature:
            raise FailedPrecondition(
                f"signature: tenant {tenant} accepts only signed adapters",
                subject="signature",
                reason="SIGNATURE_REQUIRED",
            )
        return
    if len(signature.value) != SIGNATURE_BYTES:
        raise InvalidArgument(
            f"signature.value: {len(signature.value)} bytes, not {SIGNATURE_BYTES}",
            subject="signature.value",
            reason="SIGNATURE_INVALID",
        )
    _trusted_key(policy, tenant, signature)


def verify_signature(
    policy: StorePolicy, tenant: str, signature: Signature | None, digest: str
) -> str:
    """Returns the name of the key that signed `digest`, "" for no signature where none is required.

    Raises as `check_signature`, and FailedPrecondition (SIGNATURE_INVALID): not of this digest, or
    not by this key.
    """
    check_signature(policy, tenant, signature)
    if signature is None:
        return ""
    key = _trusted_key(policy, tenant, signature)
    try:
        Ed25519PublicKey.from_public_bytes(key.public_key).verify(signature.value, digest.encode())
    except InvalidSignature as exc:
        raise FailedPrecondition(
            f"signature: it is not key {key.name}'s signature of {digest}",
            subject="signature",
            reason="SIGNATURE_INVALID",
        ) from exc
    return key.name


def require_signed(
    policy: StorePolicy,
    tenant: str,
    signature: Signature | None,
    digest: str,
    *,
    has_text: bool = False,
) -> None:
    """Checks that a recorded version may become current, by the keys that are trusted now: a key
    that was removed no longer counts. `has_text`: it has a tokenizer, a chat template or names of
    labels, which no signature covers. Raises as `verify_signature`."""
    if not policy.tenant(tenant).require_signature:
        return
    verify_signature(policy, tenant, signature, digest)
    if has_text:
        raise FailedPrecondition(
            f"version: tenant {tenant} accepts only signed adapters, and this version has a "
            "tokenizer, a chat template or names of labels, which are not signed: register the "
            "adapter again",
            subject="version",
            reason="SIGNATURE_REQUIRED",
        )


def _trusted_key(policy: StorePolicy, tenant: str, signature: Signature) -> TrustedKey:
    """Returns the key. Raises the same error for an unknown key as for one of other tenants, whose
    names are confidential."""
    key = policy.keys.get(signature.key_id)
    if key is None or (key.tenants is not None and tenant not in key.tenants):
        raise FailedPrecondition(
            f"signature.key_id: {signature.key_id[:_SHOWN_CHARS]!r} is not a trusted key of "
            f"tenant {tenant}",
            subject="signature.key_id",
            reason="KEY_UNKNOWN",
        )
    return key
