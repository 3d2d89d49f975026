"""Signs adapters: Ed25519 over the ASCII bytes of a digest, "sha256:<hex>".

The private key stays with the signer. The store has only public keys, by the names in its policy. A
key file is unencrypted PKCS 8 in PEM that only its owner can read.
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
    """A private key, and the name of its public key in the stores' policies.

    Args:
        key_id: Name of the public key in the policies.
        key: Ed25519 private key.

    Raises:
        InvalidArgument: No policy can have this name.
    """

    def __init__(self, key_id: str, key: Ed25519PrivateKey) -> None:
        if not _KEY_ID.fullmatch(key_id):
            raise _invalid("key_id", f"{key_id!r} does not match {_KEY_ID.pattern}")
        self.key_id = key_id
        self._key = key

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> SigningKey:
        """Creates a key and writes it to a new file.

        Args:
            path: File to create. The key's name is the file's name without its suffix.

        Returns:
            The new key.

        Raises:
            FileExistsError: The file exists. A key is never overwritten.
            InvalidArgument: No policy can have a key of this name.
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
        """Reads a key from a file.

        Args:
            path: File with the private key.
            key_id: Name of the key. "": the file's name without its suffix.

        Returns:
            The key.

        Raises:
            InvalidArgument: The file has no Ed25519 key. The error quotes nothing from the file.
            OSError: The file cannot be read.
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
        """Returns the public key for policy files: 32 bytes in base64."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode()

    def sign(self, digest: str) -> Signature:
        """Signs a digest.

        Args:
            digest: Digest of an adapter, "sha256:<hex>".

        Returns:
            The signature, with the key's name.

        Raises:
            InvalidArgument: `digest` is not of this form.
        """
        if not _DIGEST.fullmatch(digest):
            raise _invalid("digest", f"{digest[:80]!r} is not sha256:<64 hex digits>")
        return Signature(self.key_id, self._key.sign(digest.encode()))


def format_signature(signature: Signature) -> str:
    """Returns the line of a signature file: the key's name, a space, the value in base64.

    Args:
        signature: Signature from `SigningKey.sign`.
    """
    return f"{signature.key_id} {base64.b64encode(signature.value).decode()}"


def parse_signature(text: str, subject: str) -> Signature:
    """Reads the line of a signature file.

    Args:
        text: Text that `format_signature` returned.
        subject: Name of the text in errors, such as its path.

    Returns:
        The signature.

    Raises:
        InvalidArgument: The text is not a signature.
    """
    words = text.split()
    try:
        key_id, value = words
        return Signature(key_id, base64.b64decode(value, validate=True))
    except (ValueError, binascii.Error) as error:
        raise _invalid(
            subject, "does not consist of a key's name and a signature in base64"
        ) from error


def _invalid(subject: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{subject}: {why}", code="INVALID_ARGUMENT", subject=subject)
