"""Starts a process for a task, asks it, ends it, and reports how it failed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from servicekit.sandbox.__main__ import HEADER_BYTES, JSON, LENGTH_BYTES, RAW
from servicekit.shared_memory import SharedMemory

PROGRAM = Path(__file__).with_name("__main__.py")
ROOT = Path(__file__).resolve().parents[2]
"""Where a task finds our packages."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
"""All of its environment: it inherits nothing."""
PIPE_BYTES = 1 << 18
"""The size of its pipe, so that it need not wait in the middle of a usual answer."""
POLL_SECONDS = 0.1
READ_BYTES = 1 << 16
CPUCLOCK_SCHED = 2
"""The kind of Linux's clock of the processor time of a process."""
END_SECONDS = 5.0
"""How long a process that has closed its pipes may take to end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a process. The system enforces all but `wall_seconds` and `answer_cpu_seconds`,
    which its starter does.

    memory_bytes: address space, in addition to the use of loading the task.
    wall_seconds: how long an answer may take, however busy the machine is.
    cpu_seconds: time of a processor for all answers together, in addition to loading; None for no
        limit.
    file_bytes: the largest file that it may write.
    open_files: how many files it may have open.
    includes_loading: memory and processor time are limited in all, with the use of loading.
    niceness: added to the one of the starter: where others need the processors, it has fewer turns.
    answer_cpu_seconds: time of a processor for one answer, and for loading before the first one, to
        a tenth of a second; None for no limit.
    """

    memory_bytes: int
    wall_seconds: float
    cpu_seconds: int | None = None
    file_bytes: int = 0
    open_files: int = 32
    includes_loading: bool = False
    niceness: int = 0
    answer_cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A module that answers requests in a process of its own.

    program: the module's file. Its function `answer` takes a request, a JSON object or bytes, and
        returns the kind of the answer, one byte, and the content, bytes or text. The module is
        loaded before the limits are set, with all that it imports. An error that `answer` raises
        ends the process.
    imports_ours: whether it finds our packages. If not, nothing of ours is in its memory.
    """

    program: Path
    limits: Limits
    imports_ours: bool = True


Request = Mapping[str, Any] | bytes
"""The content of a request: a JSON object, or bytes."""


class SandboxFailure(Exception):
    """The process has not answered, and is of no more use. `is_timeout`: it took too long;
    `is_own_work`: of a processor's time, however busy the machine is. `is_killed`: others ended it,
    such as a system without memory."""

    def __init__(
        self,
        message: str,
        *,
        is_timeout: bool = False,
        is_own_work: bool = False,
        is_killed: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout
        self.is_own_work = is_own_work
        self.is_killed = is_killed


class Answer(NamedTuple):
    """`kind` is one byte, with the meaning that the task gives it. Nothing in it is trusted."""

    kind: bytes
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


def ask_once(
    task: Task,
    request: Request,
    max_bytes: int,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Answer:
    """Has a process of its own answer one request. Raises as `SandboxProcess.ask`."""
    process = SandboxProcess(task, ends_with_starter=True)
    try:
        return process.ask(request, max_bytes, check_cancelled)
    finally:
        process.end()


class SandboxProcess:
    """A process that runs a task, for one thread at a time. It ends with this service at the
    latest."""

    def __init__(
        self, task: Task, *, ends_with_starter: bool = False, memory: SharedMemory | None = None
    ) -> None:
        """Starts it. With `ends_with_starter` the system ends it at once, even while it answers,
        when the thread that starts it ends; otherwise it ends after its last answer. It inherits
        the file of `memory`, by its number, which requests tell it."""
        self.memory = memory
        self._limits = task.limits
        limits = {**asdict(task.limits), "ends_with_starter": ends_with_starter}
        arguments = [str(task.program), json.dumps(limits), *([str(ROOT)] * task.imports_ours)]
        self._popen = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM), *arguments],
            bufsize=0,
            cwd="/",
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if memory is None else (memory.file,),
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin, self._popen.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._received = bytearray()
        self._cpu_seconds = 0.0
        self.has_answered = False
        """Whether it has been loaded, and asked with success."""
        self._answers = select.poll()  # not select, which takes descriptors below 1024 only
        self._answers.register(self._stdout.fileno(), select.POLLIN)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # too many pipes of this size
                fcntl.fcntl(self._stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def cpu_seconds(self) -> float:
        """The processor time that it has taken so far, with the time for its start; of one that has
        ended, until about its end."""
        self._read_clock()
        return self._cpu_seconds

    def _read_clock(self) -> None:
        if self._popen.returncode is None:
            self._cpu_seconds = time.clock_gettime(~self.pid << 3 | CPUCLOCK_SCHED)

    def ask(
        self,
        request: Request,
        max_bytes: int,
        check_cancelled: Callable[[], None] = lambda: None,
        cpu_seconds: float | None = None,
    ) -> Answer:
        """Returns the answer to a request, of at most `max_bytes`. `check_cancelled` is called
        periodically and may raise. `cpu_seconds` replaces the limit `answer_cpu_seconds`. After any
        error the caller ends the process.

        Raises SandboxFailure."""
        limits = self._limits
        if cpu_seconds is not None:
            limits = replace(limits, answer_cpu_seconds=cpu_seconds)
        clock = _Clock(self, limits, check_cancelled)
        self._write(_frame(request), clock)
        return self._receive(max_bytes, clock)

    def send_at_once(self, request: Request) -> bool:
        """Sends a request without waiting, if it is short enough that all of it or nothing is sent.
        Its answer comes by `take_answer` or `receive`. Returns whether it was sent: a process that
        has ended shows at the next `ask`."""
        data = _frame(request)
        try:
            return len(data) <= select.PIPE_BUF and bool(os.write(self._stdin.fileno(), data))
        except OSError:
            return False

    def take_answer(self, max_bytes: int, wait_seconds: float) -> Answer | None:
        """Returns the answer to a request that was sent, of at most `max_bytes`, if it comes in
        time; None also for a process that has failed, which `receive` raises."""
        end_s = time.monotonic() + wait_seconds
        try:
            while (answer := self._next_answer(max_bytes)) is None:
                # An answer is usually there: one look at the pipe less.
                if (found := self._read()) is False:
                    return None
                left_s = max(0.0, end_s - time.monotonic())
                if found is None and not self._answers.poll(1000 * left_s):
                    return None
        except SandboxFailure:
            return None
        return answer

    def receive(self, max_bytes: int, check_cancelled: Callable[[], None] = lambda: None) -> Answer:
        """Waits for the answer to a request that was sent. Parameters and errors as of `ask`."""
        return self._receive(max_bytes, _Clock(self, self._limits, check_cancelled))

    def end(self) -> None:
        """Ends it at once, with the processes that it has started."""
        if self._popen.returncode is None:
            self._read_clock()
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        self._stdin.close()
        self._stdout.close()

    def _write(self, data: bytes, clock: _Clock) -> None:
        room = select.poll()
        room.register(self._stdin.fileno(), select.POLLOUT)
        left = memoryview(data)
        while left:
            clock.wait(room)
            try:
                left = left[os.write(self._stdin.fileno(), left) :]
            except BrokenPipeError:
                raise self._failure() from None

    def _receive(self, max_bytes: int, clock: _Clock) -> Answer:
        while (answer := self._next_answer(max_bytes)) is None:
            clock.wait(self._answers)
            if self._read() is False:
                raise self._failure()
        return answer

    def _read(self) -> bool | None:
        """Reads a part of an answer; returns None if there is none yet, and False if there will be
        none."""
        try:
            found = os.read(self._stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        self._received += found
        return bool(found)

    def _next_answer(self, max_bytes: int) -> Answer | None:
        """Returns an answer once all of it was read."""
        if len(self._received) < HEADER_BYTES:
            return None
        end = HEADER_BYTES + int.from_bytes(self._received[1:HEADER_BYTES], "big")
        if end > HEADER_BYTES + max_bytes:
            raise SandboxFailure("its answer is too long")
        if len(self._received) < end:
            return None
        kind, content = bytes(self._received[:1]), bytes(self._received[HEADER_BYTES:end])
        del self._received[:end]
        self.has_answered = True
        return Answer(kind, content)

    def _failure(self) -> SandboxFailure:
        """Returns why it has closed its pipes."""
        self._read_clock()  # the last time that it has one
        try:
            code = self._popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        if code == -signal.SIGXCPU:
            return _took_too_much()
        if code:
            words = f"signal {-code}" if code < 0 else f"exit code {code}"
            return SandboxFailure(words, is_killed=code == -signal.SIGKILL)
        return SandboxFailure("it gave no answer")


class _Clock:
    """The time that one answer may take."""

    def __init__(
        self, process: SandboxProcess, limits: Limits, check_cancelled: Callable[[], None]
    ) -> None:
        self._process, self._limits, self._check_cancelled = process, limits, check_cancelled
        self._end_s = time.monotonic() + limits.wall_seconds
        self._end_cpu_s = math.inf
        if limits.answer_cpu_seconds is not None:
            self._end_cpu_s = process.cpu_seconds + limits.answer_cpu_seconds

    def wait(self, poll: select.poll) -> None:
        """Waits until a pipe is ready or closed. Raises SandboxFailure."""
        while True:
            left_seconds = self._end_s - time.monotonic()
            if left_seconds <= 0:
                raise SandboxFailure(f"over {self._limits.wall_seconds:g} s", is_timeout=True)
            if poll.poll(1000 * min(left_seconds, POLL_SECONDS)):
                return
            if self._end_cpu_s < math.inf and self._process.cpu_seconds > self._end_cpu_s:
                raise _took_too_much()
            self._check_cancelled()


def _took_too_much() -> SandboxFailure:
    message = "more CPU time than it may take"
    return SandboxFailure(message, is_timeout=True, is_own_work=True)


def _frame(request: Request) -> bytes:
    if isinstance(request, bytes):
        kind, data = RAW, request
    else:
        kind, data = JSON, json.dumps(request).encode()
    return kind + len(data).to_bytes(LENGTH_BYTES, "big") + data
