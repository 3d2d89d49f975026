"""A gRPC server: rotating TLS, health, reflection, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from servicekit.rpc.call import Trailers
from servicekit.rpc.health import Health
from servicekit.rpc.requests import RequestTable, largest_request
from servicekit.rpc.stranger_calls import StrangerInterceptor
from servicekit.rpc.strangers import Strangers
from servicekit.rpc.tls import CertificateFiles, Certificates
from servicekit.settings.addresses import split_address

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
"""For statuses to reach their callers before connections are closed."""

MAX_CONNECTIONS = 2048
MAX_CALLS_PER_CONNECTION = 2048
MAX_WAITING_CALLS = 1 << 16
"""Calls that have arrived and that no code of ours has seen yet. gRPC ends further ones CANCELLED,
whoever makes them: so there are to be none, and strangers' connections are closed before."""
MAX_METADATA_BYTES = 8 << 10
HANDSHAKE_SECONDS = 10
IDLE_SECONDS = 600

OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a lottery
    # Clients that keep their connections alive are welcome, at any pace: a call may wait for
    # minutes without data. gRPC stops reading a connection whose answers to pings are not read.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Peers that are gone hold nothing: streams are long and may be silent.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Limits of callers without a token: connections that send nothing, or make no call.
    ("grpc.http2.bdp_probe", 0),
    # Uploads come in large messages: with the default frames of 16 KiB callers work twice as long.
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.server.max_pending_requests", MAX_WAITING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING_CALLS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
)


class RpcServer:
    """Listens from the start, so that a bad address shows at once; answers from `start` to `close`.
    `service` is its full name, `address` HOST:PORT with the real port. A message larger than any of
    `requests` is refused by its length, before it arrives.

    `trailers` are sent with the answers to health checks. Raises OSError if it cannot listen.
    """

    def __init__(
        self,
        service: str,
        address: str,
        certificates: CertificateFiles,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        requests: RequestTable,
        options: Sequence[tuple[str, int]] = (),
        trailers: Callable[[], Trailers] = tuple,
    ) -> None:
        self._service = service
        size = ("grpc.max_receive_message_length", largest_request(requests))
        callers = StrangerInterceptor()
        self._server = grpc.aio.server(
            interceptors=(callers, *interceptors), options=(*OPTIONS, size, *options)
        )
        self._health = Health((service, health.SERVICE_NAME, reflection.SERVICE_NAME), trailers)
        self.address = _listen(self._server, address, certificates)
        self._strangers = Strangers(split_address(self.address)[1])
        callers.strangers = self._strangers

    async def start(self, add_servicer: Callable[[grpc.aio.Server], None]) -> None:
        """Answers from now on; NOT_SERVING until `set_serving`."""
        add_servicer(self._server)
        self._health.add_to(self._server)
        names = (self._service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._server.start()
        self._strangers.start()

    def set_serving(self, is_serving: bool) -> None:
        """Sets the answer to health checks; has no effect after `announce_end`."""
        self._health.set_serving(is_serving)

    def announce_end(self) -> None:
        """Answers health checks with NOT_SERVING from now on."""
        self._health.announce_end()

    async def close(self) -> None:
        await self._server.stop(ANSWER_SECONDS)
        await asyncio.to_thread(self._strangers.close)


def stop_on_signals() -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets. The process ignores both from then on
    until it has ended: asyncio gives signals back when its loop closes, and a second SIGTERM would
    kill a process that is about to end well."""
    stop = asyncio.Event()
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

    def begin_end() -> None:
        stop.set()
        for number in numbers:
            if loop.remove_signal_handler(number):
                signal.signal(number, signal.SIG_IGN)

    for number in numbers:
        loop.add_signal_handler(number, begin_end)
    return stop


def withdraw_ready(ready_file: Path | None) -> None:
    """Removes the ready file of an earlier run."""
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)


def announce_ready(
    addresses: dict[str, str], ready_file: Path | None, warnings: Sequence[str]
) -> None:
    """Logs where the service listens, and writes it to its ready file, with the warnings of the
    start, which are logged already."""
    logger.info("serving", extra=addresses)
    if ready_file is not None:
        partial = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
        content = {**addresses, "warnings": list(warnings)} if warnings else addresses
        partial.write_text(json.dumps(content))
        partial.replace(ready_file)


def with_port(address: str, port: int) -> str:
    """Returns the address with its port replaced: by the port that the system chose for 0."""
    host = split_address(address)[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(server: grpc.aio.Server, address: str, certificates: CertificateFiles) -> str:
    credentials = _credentials(certificates)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    return with_port(address, port)


def _credentials(files: CertificateFiles) -> grpc.ServerCredentials | None:
    """Returns credentials that show the certificates in force at each handshake, so that new ones
    need no restart."""
    used = files.current
    if used is None:
        return None

    def renew() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if files.current is used or files.current is None:
            return None
        used = files.current
        return _configuration(used)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), renew, require_client_authentication=used.client_ca is not None
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)
