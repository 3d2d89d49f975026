"""A process that can start no more threads, or open no more files."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Each new thread asks for a stack that no machine has. Those that run go on."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def no_files_left() -> Iterator[None]:
    """Has this process open no further file."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, usual[1]))
    opened: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            opened.extend(iter(lambda: os.open(os.devnull, os.O_RDONLY), None))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for file in opened:
            os.close(file)
