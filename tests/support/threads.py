"""A process that can start no more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Each new thread asks for a stack that no machine has. Those that run go on."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)
