"""An S3 service that never ends an answer."""

from __future__ import annotations

import contextlib
import socket
import threading


class DrippingServer:
    """An S3 service that begins every answer, and sends a byte of it from time to time."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections.append(connection)
            self._threads.append(threading.Thread(target=self._drip, args=(connection,)))
            self._threads[-1].start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not self._over.wait(0.1):
                connection.sendall(b"x")

    def close(self) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join()
