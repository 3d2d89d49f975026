"""Marks tests that start processes, and stops all others from doing so.

`make test-unit` runs what bears none of the marks `processes`, `slow` and `long`. So that the mark
stays true, a test without it fails where it starts a process, in its fixtures too.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STARTS = (
    *((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
    (subprocess.Popen, "__init__"),
    (multiprocessing.process.BaseProcess, "start"),
)
"""The functions that start a process, by the object that has them."""


class Guard:
    """Knows whether the test that runs may start processes."""

    def __init__(self) -> None:
        self.is_open = True

    def check(self, name: str) -> None:
        """Raises RuntimeError where the running test may not start a process."""
        if not self.is_open:
            raise RuntimeError(
                f"{name}: this test starts a process; mark it with @pytest.mark.processes, "
                "or its module with pytestmark"
            )


GUARD = Guard()


def install() -> None:
    """Watches this process from now on. Not with an audit hook: Python calls it many thousand
    times for each process that begins, for a hundredth of all time."""
    for owner, name in STARTS:
        setattr(owner, name, _watched(owner.__name__, getattr(owner, name)))


def _watched(owner: str, start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def watched(*args: Any, **kwargs: Any) -> Any:
        GUARD.check(f"{owner}.{start.__name__}")
        return start(*args, **kwargs)

    return watched


def hold(item: pytest.Item) -> Iterator[None]:
    """Holds `item` to its mark, while a hook runs. Not at its tear-down: what the session shares
    ends with whichever test is the last."""
    GUARD.is_open = item.get_closest_marker("processes") is not None
    try:
        return (yield)
    finally:
        GUARD.is_open = True
