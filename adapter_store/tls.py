"""Where a store may listen, and the certificates it shows: checked before anything is served."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field

from adapter_store.config import StoreSettings
from servicekit.errors import FailedPrecondition
from servicekit.settings import split_address


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM. `client_ca`: callers need a certificate that it signed; None: they need none."""

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None


class CertificateFiles:
    """The certificates in force; None: no TLS."""

    def __init__(self, settings: StoreSettings) -> None:
        """Raises as `read_certificates`."""
        self._settings = settings
        self.current: Certificates | None = None
        self.reload()

    def reload(self) -> None:
        """Takes over the files as they are now. Raises as the constructor; the old ones stay."""
        self.current = read_certificates(self._settings)


def read_certificates(settings: StoreSettings) -> Certificates | None:
    """None: no TLS. Raises FailedPrecondition naming the setting, and OSError for a file that
    cannot be read."""
    chain, key, client_ca = (
        settings.tls_cert_file,
        settings.tls_key_file,
        settings.tls_client_ca_file,
    )
    if chain is None and key is None and client_ca is None:
        return None
    if chain is None:
        raise _invalid("tls_cert_file", "TLS needs it, too")
    if key is None:
        raise _invalid("tls_key_file", "TLS needs it, too")
    found = Certificates(
        chain.read_bytes(), key.read_bytes(), client_ca.read_bytes() if client_ca else None
    )
    # gRPC takes whatever it is given, and refuses every handshake later.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(chain, key, password="")
    except ssl.SSLError as exc:
        raise _invalid(
            "tls_cert_file", f"{chain} and {key} are not a PEM chain and its plain key"
        ) from exc
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as exc:
            raise _invalid("tls_client_ca_file", f"{client_ca} has no PEM certificate") from exc
    return found


def check_exposure(settings: StoreSettings) -> None:
    """Raises FailedPrecondition if other machines could do everything and nobody said so."""
    if settings.policy_file is not None or settings.allow_open_access:
        return
    if not _is_loopback(split_address(settings.listen)[0]):
        raise _invalid(
            "listen",
            f"{settings.listen} can be reached from other machines, which could do everything: "
            "set policy_file, or allow_open_access",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _invalid(setting: str, message: str) -> FailedPrecondition:
    return FailedPrecondition(f"{setting}: {message}", subject=setting, reason="SETTING_INVALID")
