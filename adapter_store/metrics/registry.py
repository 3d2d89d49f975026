"""The store's metrics: counted where work ends, or read from the store at every scrape."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable

from adapter_store.metrics.definitions import DEFINITIONS
from servicekit.telemetry.metrics import MetricRegistry

logger = logging.getLogger(__name__)

LOG_SECONDS = 600.0
"""How often the log has a line of the same kind."""
FAULT_CODES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS")
SERVER_METHODS = ("WatchAdapters", "PullAdapter", "RegisterLayout")
"""Methods that inference services call."""
TOKEN_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
"""Alerts use the rates of these. A series that begins with its first error has no increase that a
rate could show: these begin at 0 with the process."""


class Metrics:
    """Holds one registry per store, nothing global; names and help are in `definitions`."""

    def __init__(self) -> None:
        self.registry = made = MetricRegistry(DEFINITIONS)
        self.requests = made.counter("requests")
        self.request_seconds = made.histogram("request_seconds")
        self.rejections = made.counter("rejections")
        self.registrations = made.counter("registrations")
        self.registration_seconds = made.histogram("registration_seconds")
        self.fetched_bytes = made.counter("fetched_bytes")
        self.damaged_files = made.counter("damaged_files")
        self.compiles = made.counter("compiles")
        self.compile_seconds = made.histogram("compile_seconds")
        self.pulls = made.counter("pulls")
        self.pull_wait_seconds = made.histogram("pull_wait_seconds")
        self.pulled_bytes = made.counter("pulled_bytes")
        self._shared_pulls = made.counter("shared_pulls")
        self._logged_s: dict[str, float] = {}
        self._build_info = made.gauge("build_info")
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        for kind in ("image", "blob"):
            self.damaged_files.labels(kind)
        for result in ("ready", "incompatible", "failed"):
            self.compiles.labels(result)
        for result in ("ok", "digest_mismatch"):
            self.registrations.labels(result)
        for method in SERVER_METHODS:
            for reason in TOKEN_REFUSALS:
                self.rejections.labels(method, reason)

    def expect_calls(self, methods: Iterable[str]) -> None:
        """Starts the fault counts of these methods at 0."""
        for method in methods:
            for code in FAULT_CODES:
                self.requests.labels(method, code)

    def count_call(self, method: str, code: str, reason: str, seconds: float) -> None:
        """Counts a call that ended; `reason` is "" unless it was refused."""
        self.requests.labels(method, code).inc()
        self.request_seconds.labels(method).observe(seconds)
        if reason:
            self.rejections.labels(method, reason).inc()

    def count_share(self, how: str) -> None:
        """Counts a pull by how its bytes go, and logs each way from time to time."""
        self._shared_pulls.labels(how).inc()
        now_s = time.monotonic()
        if now_s - self._logged_s.get(how, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_s[how] = now_s
            is_shared = how == "shared"
            facts = {} if is_shared else {"reason": how}
            logger.info("image is shared" if is_shared else "image is streamed", extra=facts)

    def describe_store(self, version: str, compiler: str) -> None:
        """Sets the software's versions."""
        self._build_info.labels(version, platform.python_version(), compiler).set(1)
