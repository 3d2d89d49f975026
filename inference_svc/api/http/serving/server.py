"""Serves the application on the event loop of everything else: a token goes from the engine's
outputs to the socket without a change of threads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator
from functools import partial
from typing import Any, cast

import uvicorn

from inference_svc.api.http.serving.connections import (
    Connection,
    ConnectionLimit,
    TlsProtocol,
    max_connections,
    set_socket_options,
)
from inference_svc.api.http.serving.middleware import RequestMiddleware
from servicekit.rpc.tls import CertificateFiles, rotating_context
from servicekit.settings.addresses import split_address
from servicekit.shares import Shares

MAX_HEADER_BYTES = 32 << 10
KEEP_ALIVE_SECONDS = 75
"""Most clients and proxies close idle connections after a minute."""
BACKLOG, ACCEPTED_AT_ONCE = 2048, 32
"""Connections that wait in the kernel, and that are taken before others' events: of thousands that
send at the same moment only a few are in memory together."""
ANSWER_SECONDS = 1
"""Time for responses to reach their clients before connections are closed."""


class _Server(uvicorn.Server):
    """Installs no signal handlers: the process has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._ends = asyncio.Event()

    def end(self) -> None:
        self._ends.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        """Ticks once a second, for the date header, until `end`."""
        while not self._ends.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), 1.0)


class HttpServer:
    """Binds its address at once, so that a bad one fails before a model is loaded; accepts
    connections from `start` to `close`; `share` is a tenant's of them. Raises OSError if it cannot
    listen."""

    def __init__(self, address: str, certificates: CertificateFiles, share: float = 1.0) -> None:
        host, port = split_address(address)
        self.limit = ConnectionLimit(max_connections(), share)
        self._context = rotating_context(certificates)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            set_socket_options(self._socket)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise OSError(f"cannot listen on {address}: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._app: RequestMiddleware | None = None

    @property
    def connections(self) -> Shares:
        """The connections that known callers' requests hold."""
        return self.limit.busy

    async def start(self, app: RequestMiddleware) -> None:
        self._app = app
        self._server = _Server(_config(app, self.limit, self._context))
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        up = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait((self._task, up), return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            self._task.result()  # raises why
        self._socket.listen(BACKLOG)  # asyncio takes as many at once as it lets wait

    async def drain(self, grace_seconds: float) -> None:
        """Returns when no request runs, or after the grace."""
        if self._app is not None:
            await self._app.drain(grace_seconds)

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.end()
            await self._task
        self.limit.close_all()  # also those whose handshakes have not ended
        self._socket.close()


def _config(
    app: RequestMiddleware, limit: ConnectionLimit, context: ssl.SSLContext | None
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # The only parser of uvicorn that bounds headers.
        http=cast("type[asyncio.Protocol]", partial(_make_protocol, limit, context)),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        interface="asgi3",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=ANSWER_SECONDS,
        # The peer that is audited is the one at the connection's end, not one that a header names.
        proxy_headers=False,
        server_header=False,
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        log_level="error",
        access_log=False,
    )


def _make_protocol(
    limit: ConnectionLimit, context: ssl.SSLContext | None, **uvicorn: Any
) -> asyncio.BaseProtocol:
    """Returns an accepted socket's protocol. (asyncio's own TLS tells of a connection only once its
    handshake has ended.)"""
    connection = Connection(limit, **uvicorn)
    return connection if context is None else TlsProtocol(connection, context)
