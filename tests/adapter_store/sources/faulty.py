"""An HTTP proxy that fails as networks and services do, on demand."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Fault:
    """What to do with the next GET whose path contains `path`, `times` times.

    A `status` is answered instead of asking the service. Otherwise `after` bytes of the body pass,
    `action` is called, and then the connection is `reset`, `closed`, `stalled` (silent until the
    proxy ends), or goes on ("").
    """

    path: str
    status: int = 0
    after: int = 0
    then: str = ""
    action: Callable[[], None] | None = None
    times: int = 1
    drop_headers: tuple[str, ...] = ()
    location: str = ""


class FaultyProxy:
    """Serves `url` in front of `upstream_url` until `stop`."""

    def __init__(self, upstream_url: str) -> None:
        self.upstream = urlsplit(upstream_url)
        self.faults: list[Fault] = []
        self.gets: list[tuple[str, str]] = []
        self.most_at_once = 0
        self.gate: threading.Barrier | None = None
        self._now = 0
        self._lock = threading.Lock()
        self.stopped = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.serve(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            self.gets.append((handler.path, handler.headers.get("Range", "")))
            fault = self._fault(handler.path)
        try:
            if self.gate is not None and "adapter_model-" in handler.path:
                self.gate.wait(60)
            if fault.status:
                self._refuse(handler, fault)
            else:
                self._pass_on(handler, fault)
        finally:
            with self._lock:
                self._now -= 1

    def stop(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _fault(self, path: str) -> Fault:
        for fault in self.faults:
            if fault.times > 0 and fault.path in path:
                fault.times -= 1
                return fault
        return Fault("")

    def _refuse(self, handler: BaseHTTPRequestHandler, fault: Fault) -> None:
        handler.send_response(fault.status)
        if fault.location:
            handler.send_header("Location", fault.location)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def _pass_on(self, handler: BaseHTTPRequestHandler, fault: Fault) -> None:
        connection = http.client.HTTPConnection(self.upstream.hostname, self.upstream.port)
        dropped = {name.lower() for name in fault.drop_headers}
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in dropped}
        connection.request("GET", handler.path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        handler.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "content-length", "connection", "date"):
                handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if not fault.then and fault.action is None:
            handler.wfile.write(body)
            return
        handler.wfile.write(body[: fault.after])
        if fault.action is not None:
            fault.action()
        if fault.then == "stalled":
            self.stopped.wait()
        if fault.then == "reset":
            reset_now = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_now)
        if fault.then:
            handler.close_connection = True
        else:
            handler.wfile.write(body[fault.after :])
