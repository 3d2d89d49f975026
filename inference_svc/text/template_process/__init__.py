"""Renders adapters' chat templates in child processes, which bound their time and memory.

A template is a program of a tenant's. Jinja's sandbox keeps it from the machine; a process of its
own, without secrets in its environment, keeps it from this server's time and memory: it is ended
when one rendering takes too much of either, and the next one starts another.

__main__  the program of the child process
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from inference_svc.errors import ChatTemplateInvalid, TemplateTimeout
from inference_svc.text.prompt import Chat
from servicekit.errors import InvalidArgument

NUM_CHILDREN = 2
MEMORY_BYTES = 256 << 20
"""The memory that a template may take, beside its process's memory at start."""
WALL_SECONDS = 30.0
"""How long a child may take to answer however busy the machine is."""
HEADER_BYTES = 5
"""The header of a reply: its kind, and the length of the text in bytes."""
MAX_ERROR_BYTES = 4096

CHILD = Path(__file__).with_name("__main__.py")
ROOT = Path(__file__).resolve().parents[3]
"""Where the child finds the packages."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


class _ChildEnded(Exception):
    """The child has ended, or has to."""


class TemplateProcesses:
    """Child processes, started when they are needed, of which each renders one conversation at a
    time. Blocking and thread-safe."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(NUM_CHILDREN)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._is_closed = False

    def close(self) -> None:
        """Ends the children that are idle, and others once they have rendered."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.end()

    def render(
        self,
        source: str,
        specials: Mapping[str, str],
        chat: Chat,
        max_chars: int,
        max_seconds: float,
    ) -> str:
        """Renders as Renderer. Raises also ChatTemplateInvalid for an invalid template, and
        TemplateTimeout for one that takes too much memory."""
        request = {
            "source": source,
            "specials": dict(specials),
            "messages": [[each.role, each.content] for each in chat.messages],
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "max_chars": max_chars,
            "max_seconds": max_seconds,
        }
        with self._free:
            child = self._take()
            try:
                kind, text = child.ask(json.dumps(request).encode(), 4 * max_chars)
            except _ChildEnded:
                child.end()
                raise TemplateTimeout(
                    f"the adapter's chat template takes more than {max_seconds:g} s for these "
                    f"messages, or more than {MEMORY_BYTES >> 20} MiB of memory",
                    subject="chat",
                ) from None
            except BaseException:
                child.end()
                raise
            self._put(child)
        if kind == b"T":
            return text
        raise _error(kind, text)

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_running:
                    return child
                child.end()
        return _Child()

    def _put(self, child: _Child) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(child)
                return
        child.end()


def _error(kind: bytes, text: str) -> Exception:
    if kind == b"R":
        subject, _, message = text.partition("\n")
        return InvalidArgument(message, subject=subject)
    if kind == b"S":
        return TemplateTimeout(text, subject="chat")
    return ChatTemplateInvalid(
        f"the adapter's chat template cannot be used: {text}", subject="chat_template"
    )


class _Child:
    """One child process, and its pipes."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", str(CHILD), str(ROOT), str(MEMORY_BYTES)],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def ask(self, request: bytes, max_bytes: int) -> tuple[bytes, str]:
        """Returns the kind of the reply, and its text. Raises _ChildEnded."""
        deadline_s = time.monotonic() + WALL_SECONDS
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(len(request).to_bytes(4, "big") + request)
            stdin.flush()
        except OSError as error:
            raise _ChildEnded from error
        header = _read(stdout, HEADER_BYTES, deadline_s)
        num_bytes = int.from_bytes(header[1:], "big")
        if num_bytes > max(max_bytes, MAX_ERROR_BYTES):
            raise _ChildEnded
        return header[:1], _read(stdout, num_bytes, deadline_s).decode(errors="replace")

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unwritten data has no reader
                    continue


def _read(pipe: IO[bytes], num_bytes: int, deadline_s: float) -> bytes:
    """Returns exactly so many bytes. Raises _ChildEnded if they do not come in time."""
    data = bytearray()
    while len(data) < num_bytes:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))
        # From the file itself: a buffered reader would wait for more.
        found = os.read(pipe.fileno(), num_bytes - len(data)) if ready else b""
        if not found:
            raise _ChildEnded
        data += found
    return bytes(data)
