"""Tells over HTTP which version of each name is loaded: `GET /adapters`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from loadout_sglang.sidecar import Entry

READ_SECONDS = 5.0


def serve_table(host: str, port: int, table: Callable[[], dict[str, Entry]]) -> ThreadingHTTPServer:
    """Serves the table in a thread, until the server is shut down. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        timeout = READ_SECONDS

        def do_GET(self) -> None:
            if self.path != "/adapters":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            entries = {
                name: {
                    "model": f"{name}@{entry.loaded_version}" if entry.loaded_version else None,
                    "version": entry.version,
                    "digest": entry.digest,
                    "error": entry.error,
                }
                for name, entry in table().items()
            }
            data = json.dumps({"adapters": entries}).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Logs no requests."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="table", daemon=True).start()
    return server
