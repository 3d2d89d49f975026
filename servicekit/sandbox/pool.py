"""A few processes of one task, kept for the next request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from servicekit.sandbox.process import SandboxFailure, SandboxProcess, Task
from servicekit.shared_memory import SharedMemory


class CannotStart(Exception):
    """A process cannot be started or prepared: this machine is the cause, and no request."""


class SandboxPool:
    """At most `size` processes, started when they are needed, each for one caller at a time.
    `prepare` is called with each new one. Each has a memory of its own of `memory_bytes`, unless
    these are 0, which is zeros for each caller: copy your part before you leave. Blocking and
    thread-safe."""

    def __init__(
        self,
        task: Task,
        size: int,
        prepare: Callable[[SandboxProcess], None] | None = None,
        memory_bytes: int = 0,
    ) -> None:
        self._task, self._prepare, self._memory_bytes = task, prepare, memory_bytes
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[SandboxProcess] = []
        self._is_closed = False

    @property
    def idle(self) -> tuple[SandboxProcess, ...]:
        """The processes that wait for a caller."""
        with self._lock:
            return tuple(self._idle)

    def close(self) -> None:
        """Ends processes that are idle, and others once they have answered."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    @contextmanager
    def process(self) -> Iterator[SandboxProcess]:
        """Waits for a process, and keeps it for others afterwards; any exception ends it. Raises
        CannotStart."""
        with self._free:
            process = self._take()
            try:
                yield process
            except BaseException:
                process.end()
                raise
            self._put(process)

    def _put(self, process: SandboxProcess) -> None:
        """Keeps a process without its last caller's memory."""
        try:
            if process.memory is not None:
                process.memory.clear()
        except OSError:  # no files for it
            process.end()
            return
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.end()

    def _take(self) -> SandboxProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_running:
                    return process
                process.end()
        try:
            process = SandboxProcess(self._task, memory=self._make_memory())
        except OSError as error:
            raise CannotStart(str(error)) from error
        try:
            if self._prepare is not None:
                self._prepare(process)
        except SandboxFailure as error:
            process.end()
            raise CannotStart(str(error)) from error
        except BaseException:
            process.end()
            raise
        return process

    def _make_memory(self) -> SharedMemory | None:
        return SharedMemory("loadout-sandbox", self._memory_bytes) if self._memory_bytes else None
