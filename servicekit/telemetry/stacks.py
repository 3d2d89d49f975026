"""Lists where the threads of a process are, for people who read it during an incident."""

from __future__ import annotations

import sys
import threading
import traceback

MAX_FRAMES = 64
"""Frames of a thread that are listed, the innermost."""


def thread_stacks() -> str:
    """Returns where this process's threads are. Any thread may ask, while others hang."""
    names = {each.ident: each.name for each in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = traceback.format_stack(frame)[-MAX_FRAMES:]
        parts.append(f"thread {names.get(ident, ident)}\n{''.join(lines)}")
    return "\n".join(parts)
