"""An inference service of real processes under attack: raw connections to its HTTP front, and what
the attack costs in memory and in another tenant's time."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.forks import WATCHFUL, ForkedProcess, engine_of
from tests.support.models.zoo import Zoo

READY_S, GRACE_S, ANSWER_S = 120.0, 40.0, 120.0
MIB = 1 << 20
ATTACKER, VICTIM = "attacker", "victim"
"""Tokens, of a tenant each."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class AttackedFront:
    """The service, of the base model alone, on free ports. `num_files` is its limit of open files,
    `context` a client's if it has TLS."""

    def __init__(
        self,
        zoo: Zoo,
        folder: Path,
        *flags: str,
        num_files: int = 1024,
        context: ssl.SSLContext | None = None,
    ) -> None:
        policy = write_policy(
            folder,
            token_lines(ATTACKER, ["caller"], ["team-a"]),
            token_lines(VICTIM, ["caller"], ["team-b"]),
        )
        ready = folder / "inference.json"
        command = [
            *("env", WATCHFUL, sys.executable, "-m", "inference_svc", "--base-model", "base"),
            *("--model", str(zoo.model_dir), "--num-threads", "1", "--listen", "127.0.0.1:0"),
            *("--metrics-listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *("--kv-memory", "8MiB", "--adapter-memory", "1MiB", "--policy-file", str(policy)),
            *("--ready-file", str(ready), *flags),
        ]
        self._context = context
        with open_files(num_files):
            self.process = ForkedProcess("inference", command, folder, ready)
        found = self.process.wait_ready(READY_S)
        self.grpc = found["grpc"]
        host, _, port = found["http"].rpartition(":")
        self.http = host, int(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stop(GRACE_S) == 0, self.process.log_path.read_text()[-2000:]

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the process that serves callers."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10

    @contextmanager
    def stopped_engine(self) -> Iterator[None]:
        """No request ends meanwhile: the engine's process is stopped."""
        engine = engine_of(self.process.pid)
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    def connect(self, stack: ExitStack) -> socket.socket:
        connection = self.connect_plain(stack)
        if self._context is None:
            return connection
        return stack.enter_context(
            self._context.wrap_socket(connection, server_hostname="localhost")
        )

    def connect_plain(self, stack: ExitStack) -> socket.socket:
        """Returns a connection whose TLS, if there is any, has not begun."""
        return stack.enter_context(socket.create_connection(self.http, timeout=ANSWER_S))

    def post(
        self, stack: ExitStack, path: str, body: bytes, token: str = "", length: int | None = None
    ) -> socket.socket:
        """Sends a request, whose body is said to have `length`; does not wait for its answer."""
        connection = self.connect(stack)
        head = request_head(path, len(body) if length is None else length, token)
        connection.sendall(head + body)
        return connection

    def status(self, path: str, body: dict[str, Any] | None = None, token: str = "") -> int:
        """Returns the status of an answer."""
        with ExitStack() as stack:
            if body is None:
                connection = self.connect(stack)
                connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            else:
                connection = self.post(stack, path, json.dumps(body).encode(), token)
            return status_of(connection)

    def seconds(self, path: str, body: dict[str, Any], token: str = VICTIM) -> float:
        """Returns the time that an answer takes, which is 200."""
        start = time.monotonic()
        assert self.status(path, body, token) == 200
        return time.monotonic() - start


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    """Sets this process's limit of open files, which its children have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def request_head(path: str, length: int, token: str = "") -> bytes:
    bearer = f"authorization: Bearer {token_of(token)}\r\n" if token else ""
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\n{bearer}content-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def status_of(connection: socket.socket) -> int:
    """Returns the status of the answer, 0 if the connection ended without one."""
    head = b""
    try:
        while b"\r\n" not in head and (part := connection.recv(1 << 16)):
            head += part
    except ConnectionResetError:
        pass
    return int(head.split()[1]) if head else 0
