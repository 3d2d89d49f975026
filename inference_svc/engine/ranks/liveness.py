"""Notices a rank that does not answer, or whose start gets nowhere.

Rank 0 counts pings, not seconds: it may have been stopped itself.
"""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import NamedTuple

IO = Path("/proc/self/io")


class Progress(NamedTuple):
    """The effort of a process so far: processor seconds of its main thread, bytes that it
    has read from disks or over the network, and page faults that waited for such. All three stand
    still only while the main thread waits for something that does not come."""

    cpu_s: float
    read_bytes: int
    num_faults: int


def progress() -> Progress:
    """Returns this process's; from any thread."""
    main = threading.main_thread().ident
    assert main is not None
    cpu_s = time.clock_gettime(time.pthread_getcpuclockid(main))
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return Progress(cpu_s, _read_bytes(), num_faults)


def _read_bytes() -> int:
    """Returns 0 where the kernel does not count."""
    try:
        lines = IO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


class Limits(NamedTuple):
    """Seconds: between pings, until the first answer, without an answer, and without progress."""

    ping_s: float
    first_s: float
    silence_s: float
    stall_s: float


class Liveness:
    """Counts the pings that one rank has left unanswered, and those during which its start has got
    nowhere. Used by the thread that asks, and the one that takes answers."""

    def __init__(self) -> None:
        self.num_unanswered = 0
        self.waits_for_steps = False
        """Whether it has loaded its part: then no progress is due."""
        self._num_stalled = 0
        self.has_answered = False
        self._progress: Progress | None = None

    def asked(self) -> None:
        self.num_unanswered += 1
        self._num_stalled += 1

    def answered(self, progress: Progress | None = None) -> None:
        """Notes a message, and the progress that it reports."""
        self.has_answered = True
        self.num_unanswered = 0
        if progress is not None and progress != self._progress:
            self._progress = progress
            self._num_stalled = 0

    def fault(self, limits: Limits, *, serves: bool) -> str:
        """Returns why the rank is to be given up, after its name; "": it is not. `serves`: the
        engine has started."""
        silence_s = limits.silence_s if self.has_answered else limits.first_s
        if self.num_unanswered * limits.ping_s >= silence_s:
            return "does not answer" if serves else f"did not answer for {silence_s:g} s"
        if not self.waits_for_steps and self._num_stalled * limits.ping_s >= limits.stall_s:
            return f"made no progress for {limits.stall_s:g} s"
        return ""
