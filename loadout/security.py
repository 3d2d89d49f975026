"""Authentication of the client and of the services: bearer token and TLS.

The client sends its token with every call. The token never appears in a repr, an error or a log.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from loadout.errors import InvalidArgument

_TOKEN = re.compile(r"[\x21-\x7e]+")

ChannelOptions = tuple[tuple[str, Any], ...]


class ChannelFactory(Protocol):
    """Opens a gRPC channel for the client, which closes it.

    Args:
        address: gRPC target, such as "host:port".
        credentials: TLS credentials. None: without TLS.
        options: Channel options as pairs of name and value.

    Returns:
        A `grpc.Channel` for `Client`, a `grpc.aio.Channel` for `AsyncClient`.
    """

    def __call__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        options: ChannelOptions,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files for TLS.

    Args:
        ca_file: Certificates of the authorities that you trust. None: the public authorities.
        cert_file: This client's own certificate, for services that ask for one.
        key_file: Private key of `cert_file`, unencrypted.
    """

    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None


class Security:
    """The token and the TLS credentials of one client.

    Args:
        token: Bearer token. None: send none.
        tls: True trusts the public authorities. None or False: no TLS.
        allow_insecure_token: Allow the token without TLS to other machines.

    Raises:
        InvalidArgument: The token does not fit into a header, a file is not PEM, or a certificate
            comes without its key. `subject` names the argument.
    """

    def __init__(
        self, token: str | None, tls: TlsConfig | bool | None, allow_insecure_token: bool
    ) -> None:
        if token is not None and not _TOKEN.fullmatch(token):
            raise _invalid("token", "must consist of visible ASCII characters, at least one")
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        self._credentials = _credentials(TlsConfig() if tls is True else tls) if tls else None
        self._allow_insecure_token = allow_insecure_token

    def check(self, argument: str, address: str) -> None:
        """Checks that the token would not cross a network unencrypted.

        Args:
            argument: Name of the argument that has the address, for the error.
            address: gRPC target.

        Raises:
            InvalidArgument: The token would be sent to another machine without TLS.
        """
        if self._metadata is None or self._credentials is not None or self._allow_insecure_token:
            return
        if not is_loopback(address):
            raise _invalid(
                argument,
                f"the token would go to {address} without TLS: use TLS, or allow_insecure_token",
            )

    def open_channel(
        self, factory: ChannelFactory, address: str, options: ChannelOptions, server_name: str = ""
    ) -> Any:
        """Opens a channel.

        Args:
            factory: Opens the channel.
            address: gRPC target.
            options: Channel options as pairs of name and value.
            server_name: Name that the certificate must have. "": the address's own host.

        Returns:
            The channel that `factory` returns.
        """
        if self._credentials is not None:
            if server_name:
                options = (*options, ("grpc.ssl_target_name_override", server_name))
        elif self._metadata is not None:
            # A proxy of the environment would read the token on its way, to loopback, too.
            options = (*options, ("grpc.enable_http_proxy", 0))
        return factory(address, self._credentials, options)

    def sign(self, method: Any, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        """Makes a stub's method send the token.

        Args:
            method: Method of a gRPC stub.
            metadata: Further metadata to send, as pairs of key and value.

        Returns:
            A callable that takes a request and a timeout in seconds.
        """
        metadata = (*(self._metadata or ()), *metadata)
        if not metadata:
            return method

        def call(request: Any, timeout: float | None = None) -> Any:
            return method(request, timeout=timeout, metadata=metadata)

        return call


def is_loopback(address: str) -> bool:
    """Returns whether a gRPC target is on this machine. Names other than localhost count as remote.

    Args:
        address: gRPC target; may be several addresses with commas.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    target = re.sub(r"^(dns:(///)?|ipv[46]:)", "", address)
    return all(_is_loopback_host(_host(each)) for each in target.split(","))


def _host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    return (host if colon and port.isdecimal() else address).strip("[]")


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    if (tls.cert_file is None) != (tls.key_file is None):
        missing = "cert_file" if tls.cert_file is None else "key_file"
        raise _invalid(
            f"tls.{missing}", "is missing: a certificate needs its key, and a key its certificate"
        )
    ca, cert, key = (
        None if path is None else _read(f"tls.{name}", path)
        for name, path in (
            ("ca_file", tls.ca_file),
            ("cert_file", tls.cert_file),
            ("key_file", tls.key_file),
        )
    )
    # gRPC takes any files, and every call would end with an unreachable service.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca_file is not None:
        try:
            context.load_verify_locations(tls.ca_file)
        except ssl.SSLError as error:
            raise _invalid("tls.ca_file", f"{tls.ca_file} has no PEM certificate") from error
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file, password="")
        except ssl.SSLError as error:
            raise _invalid(
                "tls.cert_file",
                f"{tls.cert_file} and {tls.key_file} are not a PEM chain and its unencrypted key",
            ) from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def _read(argument: str, path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _invalid(argument, f"{path} cannot be read: {error.strerror}") from error


def _invalid(argument: str, message: str) -> InvalidArgument:
    return InvalidArgument(f"{argument}: {message}", code="INVALID_ARGUMENT", subject=argument)
