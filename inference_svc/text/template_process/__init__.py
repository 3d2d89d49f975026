"""Renders adapters' chat templates in sandboxed processes, which bound their time and memory.

A template is a program of a tenant's. Jinja's sandbox keeps it from the machine; a process of its
own keeps it from this server's time and memory: it is ended when one rendering takes too much of
either, and the next one starts another.

task  renders conversations, in that process
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inference_svc.errors import ChatTemplateInvalid, TemplateTimeout
from inference_svc.text.chat import Chat
from servicekit.errors import InvalidArgument
from servicekit.sandbox.pool import SandboxPool
from servicekit.sandbox.process import Answer, Limits, SandboxFailure, Task

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
    """Processes, of which each renders one conversation at a time. Blocking and thread-safe."""

    def __init__(self) -> None:
        self.pool = SandboxPool(TASK, NUM_CHILDREN)

    def close(self) -> None:
        """Ends the children that are idle, and others once they have rendered."""
        self.pool.close()

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
        try:
            with self.pool.process() as child:
                answer = child.ask(request, max(4 * max_chars, MAX_ERROR_BYTES))
        except SandboxFailure:
            raise TemplateTimeout(
                f"the adapter's chat template takes more than {max_seconds:g} s for these "
                f"messages, or more than {MEMORY_BYTES >> 20} MiB of memory",
                subject="chat",
            ) from None
        if answer.kind == b"T":
            return answer.text
        raise _error(answer)


def _error(answer: Answer) -> Exception:
    if answer.kind == b"R":
        subject, _, message = answer.text.partition("\n")
        return InvalidArgument(message, subject=subject)
    if answer.kind == b"S":
        return TemplateTimeout(answer.text, subject="chat")
    return ChatTemplateInvalid(
        f"the adapter's chat template cannot be used: {answer.text}", subject="chat_template"
    )
