"""Answers the requests of one task: the program of a limited process.

Run as `python -I .../__main__.py PROGRAM LIMITS [ROOT]`, by its path: it imports nothing of ours
but PROGRAM, the task, which finds our packages in ROOT. LIMITS is a JSON object, the fields of
servicekit.sandbox.process.Limits and `ends_with_starter`. A request on stdin is its kind, one byte,
its length, four bytes, and its content: JSON, or bytes as they are. An answer on stdout has the
same form; its kind has the meaning that the task gives it.

The limits are set once the task is loaded, and before the first request is read.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, BinaryIO

LENGTH_BYTES = 4
HEADER_BYTES = 1 + LENGTH_BYTES
JSON, RAW = b"J", b"R"
"""The kinds of requests."""
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38

Answer = Callable[[Any], tuple[bytes, bytes | str]]


def load(program: str) -> Answer:
    """Loads a task, as a module without a package."""
    module = sys.modules["task"] = ModuleType("task")
    SourceFileLoader("task", program).exec_module(module)
    answer: Answer = module.answer
    return answer


def set_limits(limits: dict[str, Any]) -> None:
    """Sets the limits from here on. With `ends_with_starter` the system ends this process as soon
    as the thread that started it ends."""
    used_bytes = used_seconds = 0
    if not limits["includes_loading"]:
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        used_seconds = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
    for kind, limit in (
        (resource.RLIMIT_AS, used_bytes + limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
    ):
        resource.setrlimit(kind, (limit, limit))
    if limits["cpu_seconds"] is not None:
        # SIGXCPU at the soft limit, which the starter recognises; SIGKILL at the hard one.
        seconds = used_seconds + limits["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    os.nice(limits["niceness"])
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if limits["ends_with_starter"]:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def serve(answer: Answer, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until there are no more."""
    while header := requests.read(HEADER_BYTES):
        request = requests.read(int.from_bytes(header[1:], "big"))
        kind, content = answer(json.loads(request) if header[:1] == JSON else request)
        data = content.encode(errors="replace") if isinstance(content, str) else content
        answers.write(kind + len(data).to_bytes(LENGTH_BYTES, "big") + data)
        answers.flush()


def main() -> None:
    program, limits, *root = sys.argv[1:]
    sys.path[:0] = root
    # Nothing that a library prints is an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer = load(program)
    set_limits(json.loads(limits))
    serve(answer, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
