"""The certificates that a service shows, and where it may listen without a policy."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from servicekit.errors import InvalidSetting
from servicekit.settings.addresses import split_address
from servicekit.settings.files import Contents, ReloadableFiles
from servicekit.settings.service import ServiceSettings


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM. With `client_ca`, callers need a certificate that it signed. `context` has all of it,
    for servers that do not take PEM."""

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext = field(repr=False, compare=False)


class CertificateFiles(ReloadableFiles):
    """The certificates in force; None: no TLS."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Raises InvalidSetting naming the setting, and OSError for a file that cannot be read."""
        self.current: Certificates | None = None
        super().__init__("tls_cert_file", *_paths(settings))

    def _use(self, contents: Contents) -> None:
        if contents:
            self.current = self._checked(*contents)

    def _checked(self, chain: bytes, key: bytes, client_ca: bytes | None = None) -> Certificates:
        # gRPC takes any files, and refuses every handshake later.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        chain_path, key_path, *client_ca_paths = self._paths
        try:
            context.load_cert_chain(chain_path, key_path, password="")
        except ssl.SSLError as exc:
            raise invalid_setting(
                "tls_cert_file",
                f"{chain_path} and {key_path} are not a PEM chain and its plain key",
            ) from exc
        for path in client_ca_paths:
            try:
                context.load_verify_locations(path)
            except ssl.SSLError as exc:
                raise invalid_setting(
                    "tls_client_ca_file", f"{path} has no PEM certificate"
                ) from exc
            context.verify_mode = ssl.CERT_REQUIRED
        # Python's ssl has read the files itself: gRPC must get the same bytes that it has checked.
        if self.read() != ((chain, key) if client_ca is None else (chain, key, client_ca)):
            raise invalid_setting("tls_cert_file", "the files changed while they were read")
        return Certificates(chain, key, client_ca, context)


def _paths(settings: ServiceSettings) -> list[Path]:
    """Returns chain, key and, if there is one, client CA; nothing without TLS. Raises
    InvalidSetting for one without the others."""
    chain, key = settings.tls_cert_file, settings.tls_key_file
    client_ca = settings.tls_client_ca_file
    if chain is None and key is None and client_ca is None:
        return []
    if chain is None:
        raise invalid_setting("tls_cert_file", "required for TLS")
    if key is None:
        raise invalid_setting("tls_key_file", "required for TLS")
    return [chain, key] if client_ca is None else [chain, key, client_ca]


def rotating_context(files: CertificateFiles) -> ssl.SSLContext | None:
    """Returns a context that shows the certificates in force at each handshake, so that new ones
    need no restart; None without TLS. Whether clients need certificates is decided once, here."""
    if files.current is None:
        return None
    context = files.current.context

    def choose(connection: ssl.SSLObject, server_name: str | None, used: ssl.SSLContext) -> None:
        """Called for every client, also for a client that names no server."""
        if files.current is not None:
            connection.context = files.current.context

    context.sni_callback = choose
    return context


def check_exposure(settings: ServiceSettings, **addresses: str) -> None:
    """Raises InvalidSetting if other machines could do everything and no setting allows it.
    `addresses` are where the service listens, by setting; "" is none."""
    if settings.policy_file is not None or settings.allow_open_access:
        return
    for setting, address in addresses.items():
        if address and not is_loopback(split_address(address)[0]):
            raise invalid_setting(
                setting,
                f"{address} can be reached from other machines, which could do everything: "
                "set --policy-file, or --allow-open-access",
            )


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine only, or its usual name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def invalid_setting(setting: str, message: str) -> InvalidSetting:
    """Returns the error to raise for a setting by name, which it shows as a flag."""
    return InvalidSetting(f"--{setting.replace('_', '-')}: {message}", subject=setting)
