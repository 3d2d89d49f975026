"""Where a server may listen, and the certificates it shows: checked before anything is served."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field

from inference_svc.config import InferenceSettings
from servicekit.errors import InvalidSetting
from servicekit.settings import split_address


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM. `client_ca`: callers need a certificate that it signed; None: they need none.
    `context` has all of it, for who does not take PEM."""

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext = field(repr=False, compare=False)


class CertificateFiles:
    """The certificates in force; None: no TLS."""

    def __init__(self, config: InferenceSettings) -> None:
        """Raises as `read_certificates`."""
        self._config = config
        self.current: Certificates | None = None
        self.reload()

    def reload(self) -> None:
        """Takes over the files as they are now. Raises as the constructor; the old ones stay."""
        self.current = read_certificates(self._config)


def read_certificates(config: InferenceSettings) -> Certificates | None:
    """None: no TLS. Raises InvalidSetting naming the setting, and OSError for a file that cannot
    be read."""
    chain, key, client_ca = config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file
    if chain is None and key is None and client_ca is None:
        return None
    if chain is None:
        raise InvalidSetting("tls_cert_file: TLS needs it, too")
    if key is None:
        raise InvalidSetting("tls_key_file: TLS needs it, too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found = Certificates(
        chain.read_bytes(), key.read_bytes(), client_ca.read_bytes() if client_ca else None, context
    )
    # gRPC takes whatever it is given, and refuses every handshake later.
    try:
        context.load_cert_chain(chain, key, password="")
    except ssl.SSLError as exc:
        raise InvalidSetting(
            f"tls_cert_file: {chain} and {key} are not a PEM chain and its plain key"
        ) from exc
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as exc:
            raise InvalidSetting(f"tls_client_ca_file: {client_ca} has no PEM certificate") from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return found


def renewing_context(files: CertificateFiles) -> ssl.SSLContext | None:
    """Shows the certificates in force at each handshake: a new one needs no restart. None: no
    TLS. Whether clients need certificates is as it was at the start."""
    if files.current is None:
        return None
    context = files.current.context

    def choose(connection: ssl.SSLObject, server_name: str | None, used: ssl.SSLContext) -> None:
        """Called for every client, also for one that names no server."""
        if files.current is not None:
            connection.context = files.current.context

    context.sni_callback = choose
    return context


def check_exposure(config: InferenceSettings) -> None:
    """Raises InvalidSetting if other machines could do everything and nobody said so."""
    if config.policy_file is not None or config.allow_open_access:
        return
    for setting, address in (("listen", config.listen), ("http", config.http)):
        if address and not _is_loopback(split_address(address)[0]):
            raise InvalidSetting(
                f"{setting}: {address} can be reached from other machines, which could do "
                "everything: set policy_file, or allow_open_access"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
