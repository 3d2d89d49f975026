"""Signing adapters: Ed25519 over the ASCII bytes of a digest, "sha256:<hex>".

The private key stays with the signer; the store has public keys only, by the names in its policy.
A key file is unencrypted PKCS 8 in PEM, readable by its owner alone.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from loadout.errors import InvalidArgument
from loadout.types import Signature

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MAX_KEY_FILE_BYTES = 64 << 10


class SigningKey:
    """A private key, and the name of its public half in the stores' policies."""

    def __init__(self, key_id: str, key: Ed25519PrivateKey) -> None:
        """Raises InvalidArgument for a name that no policy could have."""
        if not _KEY_ID.fullmatch(key_id):
            raise _invalid("key_id", f"{key_id!r} is not of the form {_KEY_ID.pattern}")
        self.key_id = key_id
        self._key = key

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> SigningKey:
        """Creates a key in a new file and names it for the file, as `load` does.

        Raises FileExistsError rather than overwrite a key.
        """
        key = cls(Path(path).stem, Ed25519PrivateKey.generate())
        pem = key._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(pem)
        return key

    @classmethod
    def load(cls, path: str | os.PathLike[str], key_id: str = "") -> SigningKey:
        """Reads the key in a file; `key_id` "": named for the file, without its suffix.

        Raises InvalidArgument, naming the file but nothing in it.
        """
        with open(path, "rb") as file:
            pem = file.read(_MAX_KEY_FILE_BYTES)
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise _invalid(str(path), "is not a private key in PEM without a password") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise _invalid(str(path), "is not an Ed25519 key")
        return cls(key_id or Path(path).stem, key)

    @property
    def public_key(self) -> str:
        """The base64 of 32 bytes, as policy files have it."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode()

    def sign(self, digest: str) -> Signature:
        """Raises InvalidArgument for what is not a digest."""
        if not _DIGEST.fullmatch(digest):
            raise _invalid("digest", f"{digest[:80]!r} is not sha256:<64 hex digits>")
        return Signature(self.key_id, self._key.sign(digest.encode()))


def format_signature(signature: Signature) -> str:
    """Returns a line of a signature file: the key's name, a space, the value in base64."""
    return f"{signature.key_id} {base64.b64encode(signature.value).decode()}"


def parse_signature(text: str, subject: str) -> Signature:
    """Reads what `format_signature` wrote. Raises InvalidArgument naming `subject`."""
    words = text.split()
    try:
        key_id, value = words
        return Signature(key_id, base64.b64decode(value, validate=True))
    except (ValueError, binascii.Error) as error:
        raise _invalid(subject, "is not a key's name and a signature in base64") from error


def _invalid(subject: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{subject}: {why}", code="INVALID_ARGUMENT", subject=subject)
