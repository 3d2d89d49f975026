"""This server's credentials for its store, and the CA it trusts there: read and checked at start.

The token appears only in calls, never in logs, messages or representations.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from inference_svc.config import InferenceSettings
from servicekit.errors import InvalidSetting, PermissionDenied
from servicekit.rpc.tls import invalid_setting, is_loopback
from servicekit.settings.addresses import split_address

logger = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StoreCertificates:
    """PEM. `ca` signs the store's certificate; `chain` and `key` are for mutual TLS."""

    ca: bytes
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class TokenFile:
    """A token in a file, reread when the file changes, so that it can be renewed."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidSetting if it holds no token, and OSError if it cannot be read."""
        self._path = path
        self._stamp = self._read_stamp()
        self._token = _read_token(path)
        self._problem = ""

    def current(self) -> str:
        """Returns the token, from any thread; the previous one while the file is unreadable or
        invalid."""
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._token = _read_token(self._path)
                self._stamp = stamp  # only now: a file that could not be read is tried again
                self._problem = ""
                logger.info("reread the store's token")
        except (OSError, InvalidSetting) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("keeping the store's previous token: %s", error)
        return self._token

    def _read_stamp(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """`certificates` None: no TLS. `token` None: calls carry none. `may_forward_tokens`: whether
    callers' tokens may be sent to the store, for calls on their behalf."""

    token: TokenFile | None = None
    certificates: StoreCertificates | None = None
    may_forward_tokens: bool = True

    def metadata(self) -> Metadata:
        """Returns the metadata of our own calls."""
        if self.token is None:
            return ()
        return (("authorization", f"Bearer {self.token.current()}"),)

    def forwarded_metadata(self, token: str | None) -> Metadata:
        """Returns the metadata of a call on behalf of a caller with this token. Raises
        PermissionDenied where others could read the token on the way."""
        if token is None:
            return ()
        if not self.may_forward_tokens:
            raise PermissionDenied("this server has no TLS to its store and forwards no tokens")
        return (("authorization", f"Bearer {token}"),)


NO_ACCESS = StoreAccess()


def read_store_access(config: InferenceSettings) -> StoreAccess:
    """Raises InvalidSetting naming the setting, and OSError for a file that cannot be read."""
    certificates = _read_certificates(config)
    exposed = _exposed_address(config) if certificates is None else None
    if config.store_token_file is None:
        return StoreAccess(None, certificates, exposed is None)
    if exposed is not None:
        raise invalid_setting(
            "store_token_file",
            f"the token would be sent to {exposed} in the clear: "
            "set --store-tls-ca-file, or --store-allow-insecure-token",
        )
    return StoreAccess(TokenFile(config.store_token_file), certificates)


def _exposed_address(config: InferenceSettings) -> str | None:
    """Returns a store to which a token would be sent in the clear, unless a setting allows it."""
    if config.store_allow_insecure_token:
        return None
    others = (a for a in config.store_addresses if not is_loopback(split_address(a)[0]))
    return next(others, None)


def _read_certificates(config: InferenceSettings) -> StoreCertificates | None:
    ca, chain, key = (
        config.store_tls_ca_file,
        config.store_tls_cert_file,
        config.store_tls_key_file,
    )
    if ca is None:
        if chain is not None or key is not None:
            raise invalid_setting("store_tls_ca_file", "required by a client certificate")
        return None
    if (chain is None) != (key is None):
        missing = "store_tls_cert_file" if chain is None else "store_tls_key_file"
        raise invalid_setting(missing, "required by a client certificate")
    found = StoreCertificates(
        ca.read_bytes(),
        None if chain is None else chain.read_bytes(),
        None if key is None else key.read_bytes(),
    )
    # gRPC accepts any bytes, and fails every handshake later.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise invalid_setting("store_tls_ca_file", f"{ca} has no PEM certificate") from None
    if chain is not None:
        try:
            context.load_cert_chain(chain, key, password="")
        except ssl.SSLError:
            raise invalid_setting(
                "store_tls_cert_file", f"{chain} and {key} are not a PEM chain and its plain key"
            ) from None
    return found


def _read_token(path: Path) -> str:
    token = path.read_bytes().strip()
    if not token or any(byte <= 32 or byte >= 127 for byte in token):
        raise invalid_setting("store_token_file", f"{path} must hold a token and nothing else")
    return token.decode("ascii")
