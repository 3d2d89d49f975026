"""Follows the system calls of a running child process, all its threads, in the order they happen.

Linux's ptrace without any tool or privilege: a process may trace its own children. A thread is
stopped when a call begins and when it has ended, and goes on only when that has been written down;
so what one thread does because of another's call is written down after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

_SYSCALL, _DETACH, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 24, 17, 0x4206, 0x4207, 0x420E
_OPTIONS = 1 | 8  # TRACESYSGOOD: calls differ from traps; TRACECLONE: new threads are followed
_EVENT_STOP = 128
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_OF_THIS_THREAD = 0x40000000 | 0x20000000  # __WALL | __WNOTHREAD
_ENTRY, _EXIT = 1, 2

# What is written down; the numbers are of the kernel's tables.
_NAMES = {
    "x86_64": {
        74: "fsync", 75: "fdatasync", 82: "rename", 264: "rename", 316: "rename",
        1: "write", 18: "write", 20: "write", 296: "write", 44: "send", 46: "send", 307: "send",
    },
    "aarch64": {
        82: "fsync", 83: "fdatasync", 38: "rename", 276: "rename",
        64: "write", 66: "write", 68: "write", 70: "write", 206: "send", 211: "send", 269: "send",
    },
}  # fmt: skip
_RENAME_PATHS = {82: (0, 1)}  # where the two paths are among the arguments; 1 and 3 for the others
_SENDTO = {44, 206}
_MAX_SENT_BYTES = 1 << 20


class _SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("value", ctypes.c_uint64 * 7),  # entry: number and arguments; exit: the result first
    )


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A call that succeeded, or for `send` one that begins: then its bytes may arrive.

    `path` is of the file written or synced, or the old name of a rename with `target` as the new.
    """

    name: str
    path: str
    target: str = ""
    data: bytes = b""


class Tracer:
    """Follows process `pid` until it ends. `calls` grows while it runs; read it from any thread."""

    def __init__(self, pid: int) -> None:
        self.calls: list[SystemCall] = []
        self._pid = pid
        self._names = _NAMES[platform.machine()]
        self._begun: dict[int, SystemCall] = {}
        self._error: BaseException | None = None
        self._attached = threading.Event()
        # Only the thread that attached may ask, and waits for nobody else's children.
        self._thread = threading.Thread(target=self._run, name="tracer", daemon=True)

    def start(self) -> None:
        """Returns when every thread is followed. Raises OSError if that is not allowed."""
        self._thread.start()
        self._attached.wait()
        if self._error is not None:
            raise self._error

    def join(self, timeout_seconds: float) -> None:
        """Waits until the process has ended. Raises what went wrong meanwhile."""
        self._thread.join(timeout_seconds)
        assert not self._thread.is_alive(), "the traced process has not ended"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._attach()
            self._attached.set()
            while True:
                thread_id, status = os.waitpid(-1, _OF_THIS_THREAD)
                if os.WIFSTOPPED(status):
                    self._go_on(thread_id, self._stopped(thread_id, status))
        except ChildProcessError:
            pass  # all of its threads have ended
        except BaseException as error:
            self._error = error
        finally:
            self._attached.set()

    def _attach(self) -> None:
        """Threads come while others are being attached: until there is no new one."""
        followed: set[int] = set()
        while new := {int(t) for t in os.listdir(f"/proc/{self._pid}/task")} - followed:
            for thread_id in new:
                try:
                    _ptrace(_SEIZE, thread_id, 0, _OPTIONS)
                    _ptrace(_INTERRUPT, thread_id)
                except OSError as error:
                    # It has just ended, or is a clone that is followed already.
                    if error.errno not in (errno.ESRCH, errno.EPERM) or not followed:
                        raise
            followed |= new

    def _stopped(self, thread_id: int, status: int) -> int:
        """Writes down what happened; gives the signal to be delivered, 0 for none."""
        stop = os.WSTOPSIG(status)
        if stop == _SYSCALL_STOP:
            self._take(thread_id)
            return 0
        return 0 if status >> 16 else stop

    def _go_on(self, thread_id: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile
            _ptrace(_SYSCALL, thread_id, 0, number)

    def _take(self, thread_id: int) -> None:
        info = _SyscallInfo()
        try:
            size = ctypes.sizeof(info)
            _ptrace(_GET_SYSCALL_INFO, thread_id, size, ctypes.addressof(info))
            if info.op == _ENTRY and info.value[0] in self._names:
                self._begin(thread_id, info.value[0], list(info.value)[1:])
            elif info.op == _EXIT:
                call = self._begun.pop(thread_id, None)
                if call is not None and ctypes.c_int64(info.value[0]).value >= 0:
                    self.calls.append(call)
        except (ProcessLookupError, FileNotFoundError):
            pass  # killed meanwhile

    def _begin(self, thread_id: int, number: int, arguments: list[int]) -> None:
        name = self._names[number]
        if name == "rename":
            old, new = _RENAME_PATHS.get(number, (1, 3))
            memory = _Memory(thread_id)
            paths = memory.text(arguments[old]), memory.text(arguments[new])
            self._begun[thread_id] = SystemCall(name, *paths)
            return
        path = os.readlink(f"/proc/{thread_id}/fd/{arguments[0]}")
        if name == "send":
            data = _Memory(thread_id).sent(number in _SENDTO, arguments)
            self.calls.append(SystemCall(name, path, data=data))
        else:
            self._begun[thread_id] = SystemCall(name, path)


class _Memory:
    """What a stopped thread's addresses hold."""

    def __init__(self, thread_id: int) -> None:
        self._path = Path(f"/proc/{thread_id}/mem")

    def read(self, address: int, length: int) -> bytes:
        with open(self._path, "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)

    def text(self, address: int) -> str:
        data = b""
        while b"\0" not in data:  # never over the end of a page: the next may not be there
            data += self.read(address + len(data), 4096 - (address + len(data)) % 4096)
        return os.fsdecode(data.partition(b"\0")[0])

    def sent(self, is_sendto: bool, arguments: list[int]) -> bytes:
        """The bytes of a send: one buffer, or those of a message header."""
        if is_sendto:
            return self.read(arguments[1], min(arguments[2], _MAX_SENT_BYTES))
        header = self.read(arguments[1], 32)
        vectors, count = (int.from_bytes(header[at : at + 8], "little") for at in (16, 24))
        parts = []
        for index in range(count):
            vector = self.read(vectors + 16 * index, 16)
            start, length = (int.from_bytes(vector[at : at + 8], "little") for at in (0, 8))
            parts.append(self.read(start, min(length, _MAX_SENT_BYTES)))
        return b"".join(parts)


def _ptrace(request: int, thread_id: int, address: int = 0, data: int = 0) -> None:
    if _LIBC.ptrace(request, thread_id, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
