"""Renders adapters' chat templates in sandboxed processes, which bound their time and memory.

A template is a program of a tenant's. Jinja's sandbox keeps it from the machine; a process of its
own keeps it from this server's time and memory: it is ended when one rendering takes too much of
either, and the next one starts another.

task  renders conversations, in that process
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from inference_svc.errors import ChatTemplateInvalid, TemplateTimeout
from inference_svc.text.chat import Chat
from servicekit.errors import InvalidArgument
from servicekit.sandbox.process import Answer, Limits, SandboxFailure, SandboxProcess, Task

NUM_CHILDREN = 2
MEMORY_BYTES = 256 << 20
"""The memory that a template may take, beside its process's memory at start."""
MAX_ERROR_BYTES = 4096
TASK = Task(
    Path(__file__).with_name("task.py"),
    Limits(MEMORY_BYTES, wall_seconds=30.0, open_files=16),
)
"""The task itself limits the processor time of each rendering."""


class TemplateProcesses:
    """Processes, started when they are needed, of which each renders one conversation at a time.
    Blocking and thread-safe."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(NUM_CHILDREN)
        self._lock = threading.Lock()
        self._idle: list[SandboxProcess] = []
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
            "chat": chat.to_json(),
            "max_chars": max_chars,
            "max_seconds": max_seconds,
        }
        with self._free:
            child = self._take()
            try:
                answer = child.ask(request, max(4 * max_chars, MAX_ERROR_BYTES))
            except SandboxFailure:
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
        if answer.kind == b"T":
            return answer.text
        raise _error(answer)

    def _take(self) -> SandboxProcess:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_running:
                    return child
                child.end()
        return SandboxProcess(TASK)

    def _put(self, child: SandboxProcess) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(child)
                return
        child.end()


def _error(answer: Answer) -> Exception:
    if answer.kind == b"R":
        subject, _, message = answer.text.partition("\n")
        return InvalidArgument(message, subject=subject)
    if answer.kind == b"S":
        return TemplateTimeout(answer.text, subject="chat")
    return ChatTemplateInvalid(
        f"the adapter's chat template cannot be used: {answer.text}", subject="chat_template"
    )
