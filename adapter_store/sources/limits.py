"""How much one adapter's files may take, and the reasons that end their fetch early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from adapter_store.errors import CallerGone
from servicekit.errors import Draining, QuotaExceeded, ShareExceeded
from servicekit.shares import Shares

CONFIG_BYTES = 1 << 20
"""The bytes that a tenant may stage beyond its quota, which counts weights only."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one adapter. Pickled weights are fetched only if the operator allows them."""

    max_adapter_bytes: int
    max_file_bytes: int
    allow_pickle_files: bool = False


class Abandoned(Exception):
    """Raised because the fetch has ended, maybe by the failure of another file: this one is not
    needed."""


class StagedBytes:
    """The part of the place for staged bytes that one adapter's files take, counted for its tenant.
    All that the tenant stages is bounded by its quota, too. `make_room` has the functions that free
    some of the tenant's, and of all tenants': called before a caller is refused, the latter only
    where the whole place is full. Thread-safe."""

    def __init__(
        self,
        shares: Shares,
        account: str,
        max_bytes: int | None = None,
        make_room: tuple[Callable[[], object], Callable[[], object]] | None = None,
    ) -> None:
        self._shares = shares
        self._account = account
        self._max_bytes = max_bytes
        self._make_room = make_room
        self._held = shares.reserve(account, 0)
        self._text_bytes = 0

    def add(self, num_bytes: int, *, is_text: bool = False) -> None:
        """Raises ShareExceeded and QuotaExceeded before these bytes may be written. A tokenizer's
        files do not count against the quota: the kept ones do."""
        self._grow(num_bytes)
        self._text_bytes += num_bytes if is_text else 0
        staged_bytes = self._shares.used_by(self._account) - self._text_bytes
        if self._max_bytes is not None and staged_bytes > self._max_bytes + CONFIG_BYTES:
            raise QuotaExceeded(
                f"max_bytes: {self._account} has {staged_bytes} bytes of uploads and fetches in "
                f"progress, over its quota of {self._max_bytes}",
                subject="max_bytes",
            )

    def _grow(self, num_bytes: int) -> None:
        if self._make_room is None:
            self._held.grow(num_bytes)
            return
        of_tenant, of_all = self._make_room
        with suppress(ShareExceeded):
            self._held.grow(num_bytes)
            return
        of_tenant()
        if self._shares.used + num_bytes > self._shares.capacity:
            of_all()
        self._held.grow(num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Gives back all but this much."""
        self._held.shrink(num_bytes)

    def release(self) -> None:
        self._held.release()


@dataclass(frozen=True, slots=True)
class Stop:
    """The reasons that end a fetch early: the store's shutdown, or the caller's leaving."""

    draining: threading.Event = field(default_factory=threading.Event)
    caller_gone: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises Draining or CallerGone."""
        if self.draining.is_set():
            raise Draining("this store is shutting down")
        if self.caller_gone.is_set():
            raise CallerGone("the caller left before its source was fetched")


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The reasons that make an adapter's files unneeded: `stop`, or that they were abandoned."""

    stop: Stop
    abandoned: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises Draining, CallerGone or Abandoned."""
        self.stop.check()
        if self.abandoned.is_set():
            raise Abandoned
