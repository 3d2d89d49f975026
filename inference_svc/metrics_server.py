"""Serves metrics over HTTP, for Prometheus."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Scrapes are not worth a line."""


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ThreadingServerV6(_ThreadingServer):
    address_family = socket.AF_INET6


def _plain_app(registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    """Answers in the text format, whatever else is asked for: prometheus_client's OpenMetrics has
    underscores for the colons of the names by which gateways route."""
    app = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return app({**environ, "HTTP_ACCEPT": ""}, start_response)

    return answer


class MetricsServer:
    """Serves `registry` in a thread of its own. Raises OSError if it cannot listen."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        kind = _ThreadingServerV6 if ":" in host else _ThreadingServer
        try:
            self._server = make_server(host, port, _plain_app(registry), kind, _QuietHandler)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.port: int = self._server.server_port
        # Polled often, so that closing takes no half second.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="loadout-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
