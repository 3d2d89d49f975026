"""How fast large images come where the model computes on the processors that pull them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

UNPACED_BYTES = 64 << 20
"""The part of each image that comes as fast as it can: pulling so much takes no longer than a few
steps. Ranks of one machine, which have parts of it, share this and the rate."""
PROCESSOR_BYTES_PER_S = 80 << 20
"""The rate of the rest, for each processor."""
PULLING_PROCESSORS = 2
"""Where so many are left idle by steps, pulls take no time from these."""


class PullPace:
    """The pace of all pulls together, of one of `num_ranks` ranks of this machine. `is_needed` says
    whether steps are computed, and no other adapter waits for a pull to end. Thread-safe.

    Threads of a step wait for each other: time that a pull takes of one processor is lost on all of
    them.
    """

    def __init__(self, num_processors: int, num_ranks: int = 1) -> None:
        self.is_needed: Callable[[], bool] = lambda: False
        self.bytes_per_s = num_processors * PROCESSOR_BYTES_PER_S / num_ranks
        self._unpaced_bytes = UNPACED_BYTES / num_ranks
        self._lock = threading.Lock()
        self._next_s = 0.0

    @classmethod
    def where_shared(
        cls, num_processors: int, num_threads: int, num_ranks: int = 1
    ) -> PullPace | None:
        """Returns the pace beside steps of so many threads, of all ranks together; None: there is
        space beside them."""
        is_shared = num_processors - num_threads < PULLING_PROCESSORS
        return cls(num_processors, num_ranks) if is_shared else None

    def applies(self, received_bytes: int) -> bool:
        """Returns whether an image of which so much has come comes at this pace now."""
        return received_bytes > self._unpaced_bytes and self.is_needed()

    def delay_s(self, received_bytes: int, num_bytes: int) -> float:
        """Returns how long to wait after `num_bytes` more of an image of which so much has come."""
        if not self.applies(received_bytes):
            return 0.0
        with self._lock:
            now_s, due_s = time.monotonic(), num_bytes / self.bytes_per_s
            # Lost time is not made up for.
            self._next_s = max(now_s, self._next_s + due_s)
            return self._next_s - now_s
