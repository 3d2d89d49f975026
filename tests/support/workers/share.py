"""What the workers of one run share: a folder, and a process that forks (`tests.support.forks`).

The process that starts the workers has both, and they find them by variables of the environment.
Nothing heavy is imported here.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import pytest
from _pytest.junitxml import xml_key

from tests.support import durations

T = TypeVar("T")

FORKS = "LOADOUT_TEST_FORKS"
"""The environment variable with the path of the socket of the process that forks."""
FOLDER = "LOADOUT_TEST_RUN_FOLDER"
PROCESSOR_FILE = "processor"
"""The file in the folder with a line for each fork that has ended: seconds of a processor, test."""
ROOT = Path(__file__).resolve().parents[3]
BACKLOG = 64


def listen(folder: str) -> tuple[socket.socket, str]:
    """Returns a socket at a path in the folder, where the process that forks will listen."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/socket")
    listener.listen(BACKLOG)
    return listener, f"{folder}/socket"


def begin(listener: socket.socket, address: str) -> subprocess.Popen[bytes]:
    """Starts the process that forks. It ends once its standard input does."""
    log: IO[bytes]
    with open(f"{address}.log", "wb") as log:
        return subprocess.Popen(
            _command(listener, address),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
        )


def _command(listener: socket.socket, address: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.forks", str(listener.fileno()), address]


def once(name: str, make: Callable[[], T]) -> T:
    """Returns what `make` returns. One worker of the run calls it, and the others read what was
    pickled."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return make()
    path = Path(folder, name)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = pickle.dumps(make())
            path.with_suffix(".part").write_bytes(made)
            path.with_suffix(".part").rename(path)
    found: T = pickle.loads(path.read_bytes())
    return found


def add_processor_s(test: str, seconds: float) -> None:
    """Adds the processor's time of a fork that `test` began. The process that forks calls this."""
    if folder := os.environ.get(FOLDER):
        with open(f"{folder}/{PROCESSOR_FILE}", "a") as file:
            file.write(f"{seconds:.3f} {test.rpartition(' ')[0]}\n")


class RunShare:
    """A plugin of the process that starts the workers. A process without threads waits until the
    first worker asks for a fork, and becomes the process that forks."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="loadout-run-")
        self._listener, self._address = listen(self._folder)
        ended, self._end = os.pipe()
        os.environ |= {FORKS: self._address, FOLDER: self._folder}
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._end)
            self._wait_and_become(ended)
        os.close(ended)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Before JUnit's file is written."""
        xml = session.config.stash.get(xml_key, None)
        path = Path(self._folder, PROCESSOR_FILE)
        if xml is None or not path.exists():
            return
        seconds: dict[str, float] = defaultdict(float)
        for line in path.read_text().splitlines():
            number, _, test = line.partition(" ")
            seconds[test] += float(number)
        for test, total in seconds.items():
            xml.add_global_property(f"{durations.FORKS}{test}", f"{total:.3f}")

    def pytest_unconfigure(self) -> None:
        os.close(self._end)
        os.waitpid(self._pid, 0)
        self._listener.close()
        shutil.rmtree(self._folder)

    def _wait_and_become(self, ended: int) -> NoReturn:
        """Never returns: this process ends, or runs another program."""
        try:
            listener = self._listener.fileno()
            ready, _, _ = select.select([listener, ended], [], [])
            if ended not in ready:
                log = os.open(f"{self._address}.log", os.O_WRONLY | os.O_CREAT)
                for number, stream in enumerate((ended, log, log)):
                    os.dup2(stream, number)
                os.set_inheritable(listener, True)
                os.chdir(ROOT)
                os.execv(sys.executable, _command(self._listener, self._address))
        finally:
            os._exit(0)
