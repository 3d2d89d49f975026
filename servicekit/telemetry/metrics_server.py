"""Serves metrics over HTTP, for Prometheus."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

POLL_SECONDS = 0.05
"""How often the server's thread checks whether to stop; closing takes this long."""


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its base's name)
        """Logs nothing: a scrape is no event."""


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ThreadingServerV6(_ThreadingServer):
    address_family = socket.AF_INET6


def _text_app(registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    """Returns an application that always answers in the text format: prometheus_client's
    OpenMetrics replaces the colons in the names that gateways expect."""
    app = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return app({**environ, "HTTP_ACCEPT": ""}, start_response)

    return answer


class MetricsServer:
    """Serves `registry` from a thread until closed. Raises OSError if it cannot listen."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        kind = _ThreadingServerV6 if ":" in host else _ThreadingServer
        try:
            self._server = make_server(host, port, _text_app(registry), kind, _QuietHandler)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
