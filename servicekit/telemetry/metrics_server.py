"""Serves metrics over HTTP, for Prometheus: to callers without a token, who hold little."""

from __future__ import annotations

import gzip
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry

from servicekit.errors import ShareExceeded
from servicekit.shares import Reservation, Shares
from servicekit.telemetry.exposition import exposition

POLL_SECONDS = 0.05
"""How often the server's thread checks whether to stop; closing takes this long."""
MAX_CONNECTIONS, PEER_SHARE = 16, 0.5
"""At once, and the share of one address in the connections that others leave free. Each is one
scrape; further ones are closed."""
REQUEST_SECONDS = 10.0
"""How long a request may take to arrive, and its answer to be read."""
MAX_HEADER_BYTES = 16 << 10
HEALTH_PATH = "/health"
GZIP_LEVEL = 1
"""The lowest: higher ones take several times as long, and a scraper is near."""
_END_OF_HEADERS = b"\r\n\r\n"


class _Handler(WSGIRequestHandler):
    """Answers one request of a connection, whose headers are here before any is looked at."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(self._headers()))

    def _headers(self) -> bytes:
        """Returns all headers; nothing if they are too large or too slow."""
        end_s = time.monotonic() + REQUEST_SECONDS
        found = b""
        while _END_OF_HEADERS not in found:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or len(found) >= MAX_HEADER_BYTES:
                return b""
            self.connection.settimeout(left_s)
            try:
                part = self.connection.recv(MAX_HEADER_BYTES - len(found))
            except OSError:
                return b""
            if not part:
                return b""
            found += part
        self.connection.settimeout(REQUEST_SECONDS)
        return found

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its base's name)
        """Logs nothing: a scrape is no event."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = Shares("metrics connections", MAX_CONNECTIONS, PEER_SHARE)
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            place = self._places.reserve(str(client_address[0]))
        except ShareExceeded:
            self.shutdown_request(request)
            return
        work = threading.Thread(
            target=self._answer, args=(place, request, client_address), name="scrape", daemon=True
        )
        try:
            work.start()
        except RuntimeError:  # no thread is left
            place.release()
            self.shutdown_request(request)

    def _answer(self, place: Reservation, request: Any, client_address: Any) -> None:
        with place:
            self.process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: the client has gone."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def _text_app(
    registry: CollectorRegistry, is_healthy: Callable[[], bool] | None
) -> Callable[..., Iterable[bytes]]:
    """Returns an application that always answers in the text format: OpenMetrics has no colons in
    names, which gateways expect."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return [b""]
        if is_healthy is not None and environ["PATH_INFO"] == HEALTH_PATH:
            start_response("200 OK" if is_healthy() else "503 Service Unavailable", [])
            return [b""]
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
        data, media_type = exposition(registry.restricted_registry(names) if names else registry)
        headers = [("Content-Type", media_type)]
        if _accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
            data = gzip.compress(data, GZIP_LEVEL)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [data]

    return answer


def _accepts_gzip(encodings: str) -> bool:
    return any(each.partition(";")[0].strip() == "gzip" for each in encodings.split(","))


class MetricsServer:
    """Serves `registry` from a thread until closed, and, with `is_healthy`, whether the service is
    healthy, at /health. Raises OSError if it cannot listen."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        is_healthy: Callable[[], bool] | None = None,
    ) -> None:
        kind = _ServerV6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, _text_app(registry, is_healthy), kind, _Handler)
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
