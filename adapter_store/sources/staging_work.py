"""Work on an adapter's files while they arrive: hashes and syncs in threads, and its time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class StagingWork:
    """Works on files in up to `max_threads` threads, until `close`. Thread-safe.

    `check_cancelled` raises the reason once the files are no longer needed.
    """

    def __init__(self, max_threads: int, check_cancelled: Callable[[], None]) -> None:
        self._check_cancelled = check_cancelled
        self._lock = threading.Lock()
        self._syncs: list[Future[None]] = []
        # Its threads start with the first large write, or the first file that is complete.
        self._threads = ThreadPoolExecutor(max_threads, "staging")
        self._num_working = 0
        self._worked_s = 0.0
        self._start_s = 0.0

    def start_hashing(self, update: Callable[[bytes], None], data: Any) -> Future[None]:
        """Calls a hash's `update` with data in a thread. Raises as `Staging.check_cancelled`,
        and RuntimeError if there are no more threads."""
        return self._start(update, data)

    def start_sync(self, path: Path) -> None:
        """Makes a complete file durable in a thread: it is read meanwhile. Raises as
        `start_hashing`."""
        syncing = self._start(self._sync, path)
        with self._lock:
            self._syncs.append(syncing)

    def wait_durable(self) -> None:
        """Returns when all complete files are durable. Raises OSError."""
        with self._lock:
            syncs = [*self._syncs]
        for syncing in syncs:
            syncing.result()

    def _sync(self, path: Path) -> None:
        with self.local():
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _start(self, work: Callable[[Any], None], subject: Any) -> Future[None]:
        try:
            return self._threads.submit(work, subject)
        except RuntimeError:
            self._check_cancelled()
            raise

    @contextmanager
    def local(self) -> Iterator[None]:
        """Counts the time in the context as this store's own: see `local_seconds`."""
        with self._lock:
            if not self._num_working:
                self._start_s = time.monotonic()
            self._num_working += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_working -= 1
                if not self._num_working:
                    self._worked_s += time.monotonic() - self._start_s

    @property
    def local_seconds(self) -> float:
        """How long files have been written, hashed and synced: whoever sends them was not waited
        for."""
        with self._lock:
            now_s = time.monotonic() if self._num_working else self._start_s
            return self._worked_s + now_s - self._start_s

    def close(self) -> None:
        """Starts no more; lets the running work end."""
        self._threads.shutdown(wait=False)
