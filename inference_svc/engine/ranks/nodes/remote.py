"""A rank of another node, as rank 0 sees it."""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

from inference_svc.engine.ranks.nodes.connections import as_connection, limit_time, prepare
from inference_svc.engine.ranks.peers import EXCHANGE_S, SILENCE_S, OtherRank
from inference_svc.model.description import Rank


class RemoteRank(OtherRank):
    """A rank that comes to rank 0, which cannot kill it: rank 0 closes the connections, and the
    rank ends itself when it notices, or hears nothing for SILENCE_S."""

    def __init__(self, rank: Rank, node: int) -> None:
        super().__init__(rank)
        self._node = node
        self._has_come, self._is_over = threading.Event(), False
        self._process = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank.index} on node {self._node}"

    @property
    def place(self) -> str:
        return self._process

    @property
    def has_come(self) -> bool:
        return self._has_come.is_set()

    def attach(self, control: socket.socket, steps: socket.socket, process: str) -> bool:
        """Takes the connections of the rank, which is this process for operators; returns whether
        it may come: once, and before the end."""
        with self._lock:
            if self.has_come or self._is_over:
                return False
            for each, send_s in ((control, SILENCE_S), (steps, EXCHANGE_S)):
                prepare(each, SILENCE_S)
                limit_time(each, socket.SO_SNDTIMEO, send_s)
            self.control, self.steps = as_connection(control), as_connection(steps)
            self._process = process
            self._has_come.set()
            return True

    def send(self, message: object) -> None:
        """Sends nothing before the rank has come."""
        if self.has_come and not self._is_over:
            super().send(message)

    def receive(self) -> Any:
        self._has_come.wait()
        try:
            if self._is_over:
                raise EOFError
            return super().receive()
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                self._hangs = self._hangs or "does not answer"
            raise

    def kill(self, why: str = "does not answer") -> None:
        if not self.is_read.is_set():
            self._hangs = self._hangs or why
        self.hang_up()

    def end(self, timeout_s: float) -> str:
        if not self.is_read.wait(timeout_s):
            self.kill()
            self.is_read.wait(timeout_s)
        return self._ending("closed its connection")

    def hang_up(self) -> None:
        self._is_over = True
        if self._process:
            super().hang_up()
        self._has_come.set()  # its reader ends

    def close(self) -> None:
        if self._process:
            super().close()
