"""A clock that stands until a test moves it."""

from __future__ import annotations


class Clock:
    """Stands in for `time.monotonic` and its like; tests set `now_s`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
