"""The callers' side: processes that are forks, started, awaited and ended."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from loadout.demo.process import Process
from tests.support.forks.request import CLI, Request
from tests.support.machine.small_volume import SmallVolume
from tests.support.workers import share

ADDRESS = share.FORKS
"""Workers of a run share a process that forks by this variable, and forks have engines forked."""
TURN_S = 0.05
PROGRAM = Path(__file__).with_name("program.py")


class Fork:
    """A process that was forked, with the methods of `subprocess.Popen`."""

    def __init__(self, request: Request, streams: tuple[int, int, int]) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address())
        socket.send_fds(self._socket, [b"f"], [*streams, *request.files])
        body = json.dumps(asdict(request)).encode()
        self._socket.sendall(len(body).to_bytes(4) + body)
        self.pid = int.from_bytes(self._receive(4))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            with self._lock:  # not for long: other threads wait as well
                self._take(max(0.0, min(TURN_S, deadline_s - time.monotonic())))
            if self.returncode is None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return self.returncode

    def _take(self, timeout_s: float) -> None:
        """Takes the status, if it comes in this time."""
        if self.returncode is not None:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            self.returncode = int.from_bytes(self._receive(4), signed=True)
            self._socket.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has ended, and its status is on the way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _receive(self, count: int) -> bytes:
        found = self._socket.recv(count, socket.MSG_WAITALL)
        if len(found) < count:
            raise RuntimeError(f"the process that forks has ended; see its log: {address()}.log")
        return found


def run(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs a module, or a file whose name ends with .py, as `python -m` would, to its end.
    `imports`: see Request."""
    variables = {**os.environ, **(environment or {})}
    with (
        open(os.devnull) as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
    ):
        streams = (nothing.fileno(), out.fileno(), errors.fileno())
        request = Request(program, arguments, variables, os.getcwd(), imports=imports)
        code = Fork(request, streams).wait()
        out.seek(0)
        errors.seek(0)
        command = [program, *arguments]
        return subprocess.CompletedProcess(command, code, out.read(), errors.read())


class Piped(Fork):
    """A fork with pipes for its input and output. Its errors are ours."""

    def __init__(self, request: Request) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        with open(theirs_in, "rb"), open(theirs_out, "wb"):
            super().__init__(request, (theirs_in, theirs_out, 2))


@contextlib.contextmanager
def piped(program: str, *arguments: str) -> Iterator[Piped]:
    """Runs a module while the context lasts. It is to end when its input does."""
    made = Piped(Request(program, arguments, dict(os.environ), os.getcwd()))
    with made.stdout:
        with made.stdin:
            yield made
        made.wait()


class ForkedProcess(Process):
    """`Process` of a command `python -m module arguments`, which `env` may run, forked."""

    def _begin(self, command: Sequence[str]) -> Any:
        first = command.index(sys.executable)
        assert command[first + 1] == "-m", command
        assert list(command[: min(first, 1)]) == ["env"][:first], command
        environment = dict(each.split("=", 1) for each in command[1:first])
        self.log_path.unlink(missing_ok=True)
        module, *arguments = command[first + 2 :]
        return start(module, arguments, self.log_path, environment)


def start(
    module: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    volume: SmallVolume | None = None,
) -> Fork:
    """Runs the main function of a service with its output at the end of `log`. Its environment and
    its limit of open files are this process's as they are now, with further variables. It sees the
    `volume`."""
    variables = {**os.environ, **(environment or {})}
    pid = None if volume is None else volume.pid
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    request = Request(module, list(arguments), variables, os.getcwd(), pid, max_files)
    with log.open("ab", buffering=0) as file, open(os.devnull) as nothing:
        return Fork(request, (nothing.fileno(), file.fileno(), file.fileno()))


def engine_of(service_pid: int) -> int:
    """Returns the pid of the engine of a forked service."""
    if found := engines_of(service_pid):
        return found[0]
    raise AssertionError(f"process {service_pid} has no engine")


def engines_of(service_pid: int) -> list[int]:
    """Returns the pids of engines that are forks, and that this process has begun."""
    name, found = f"{engine_name(service_pid)}\n", []
    for status in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if status.read_text() == name:
                found.append(int(status.parent.name))
    return found


def engine_name(service_pid: int) -> str:
    return f"engine-{service_pid}"


def variables(prefix: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Returns environment variables of settings by their names, with hyphens or underscores."""
    return {
        f"LOADOUT_{prefix}_{name.replace('-', '_').upper()}": str(value)
        for name, value in settings.items()
    }


@cache
def address() -> str:
    """Returns the path of the socket, where a process listens that imports and forks."""
    if found := os.environ.get(ADDRESS):
        return found
    folder = tempfile.mkdtemp(prefix="loadout-forks-")
    listener, address = share.listen(folder)
    with listener:
        process = share.begin(listener, address)
    atexit.register(_end, process, folder)
    return address


@cache
def programs() -> Path:
    """Returns a folder for PATH with a `loadout` that forks run, and the services that it becomes:
    shells start it at once."""
    folder = Path(tempfile.mkdtemp(prefix="loadout-programs-"))
    atexit.register(shutil.rmtree, folder)
    command = [sys.executable, "-ISE", str(PROGRAM), address(), CLI]
    (folder / "loadout").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    (folder / "loadout").chmod(0o700)
    return folder


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")
    os.rmdir(folder)
