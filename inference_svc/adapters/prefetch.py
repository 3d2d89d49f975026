"""Loads adapters before a request needs them, within a share of the bandwidth.

`PrefetchPolicy` chooses, over plain data; it has no clock. `Prefetcher` carries the choice out with
the same loads and memory as any other load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from inference_svc.adapters.load_states import Load, Loads
from inference_svc.adapters.memory.eviction import EvictionReason
from inference_svc.adapters.memory.placement import Placement
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import MemoryTiers
from inference_svc.adapters.popularity import Popularity

SHARE = 0.25
"""Part of the measured pull rate that prefetching may use."""
INITIAL_RATE = 200e6
"""Pull rate in bytes per second that is assumed before one was measured."""
RATE_SMOOTHING = 0.2
"""Weight of the newest measurement of the rate."""
BURST_S = 1.0
"""Budget that is saved up while there is nothing to prefetch."""
MIN_SCORE = 0.5
"""Requests, weighted by age: one, if it is not older than a half-life."""
MARGIN = 1.5
"""Factor by which a prefetched image must be more popular than the image that it displaces: else
two equals would displace each other for ever."""
CHECK_INTERVAL_S = 0.25
"""Least time between two searches for something to prefetch, unless a name moves."""
BACKOFF_S = 10.0
"""Time before an image that found no memory is tried again."""


class ByteBudget:
    """A token bucket of bytes, filled at `share` of the measured pull rate.

    It may go into debt by one image, so that one larger than the bucket is possible: within any
    T seconds it grants at most `share * rate * (T + BURST_S)` bytes and one image.
    """

    def __init__(self, share: float = SHARE, rate: float = INITIAL_RATE) -> None:
        assert 0 < share <= 1
        assert rate > 0
        self.share = share
        self.rate = rate
        self._level = 0.0
        self._filled_s: float | None = None

    def record_pull(self, num_bytes: int, seconds: float) -> None:
        """Measures the rate by a pull of `num_bytes` that took `seconds`."""
        if num_bytes > 0 and seconds > 0:
            self.rate += RATE_SMOOTHING * (num_bytes / seconds - self.rate)

    def take(self, num_bytes: int, now_s: float) -> None:
        self._fill(now_s)
        self._level -= num_bytes

    def wait_s(self, now_s: float) -> float:
        """Returns how long until something may be taken; 0: now."""
        self._fill(now_s)
        return max(0.0, -self._level) / (self.share * self.rate)

    def _fill(self, now_s: float) -> None:
        if self._filled_s is not None:
            fill = self.share * self.rate * max(0.0, now_s - self._filled_s)
            self._level = min(self._level + fill, self.share * self.rate * BURST_S)
        self._filled_s = now_s


@dataclass
class PrefetchCounters:
    """Monotonic counts: images whose bytes were prefetched, and how many bytes; prefetched images
    that a request then found, complete or arriving; bytes that were evicted or failed before."""

    prefetched: int = 0
    prefetched_bytes: int = 0
    hits: int = 0
    wasted_bytes: int = 0


@dataclass
class PrefetchPolicy:
    """Chooses images to prefetch. One image at a time is on its way, `current`. `unused` are the
    images that no request has used yet, with their bytes."""

    popularity: Popularity = field(default_factory=Popularity)
    budget: ByteBudget = field(default_factory=ByteBudget)
    counters: PrefetchCounters = field(default_factory=PrefetchCounters)
    current: str = ""
    unused: dict[str, int] = field(default_factory=dict)
    _current_bytes: int = 0
    _backoff_until_s: dict[str, float] = field(default_factory=dict)
    _next_check_s: float | None = None

    # Traffic.

    def on_request(self, digest: str, now_s: float, *, count: bool = True) -> None:
        """Records a waiter; if the digest is current, it becomes an ordinary load.
        `count`: it is a request, of which there may be more."""
        if count:
            self.popularity.record(digest, now_s)
        if self.unused.pop(digest, None) is not None:
            self.counters.hits += 1
        if digest == self.current:
            self.counters.hits += self._current_bytes > 0
            self._end_current(now_s)
        self._schedule_check(now_s)

    def on_repointed(self, old_digest: str, new_digest: str, now_s: float) -> None:
        """Records that a name moved from one digest to the other. The next image to prefetch is
        searched at once, because whoever registered the new one may request it in a few
        milliseconds."""
        self.popularity.inherit(new_digest, old_digest)
        self._backoff_until_s.pop(new_digest, None)
        self._next_check_s = now_s

    # The choice.

    def choose(
        self,
        now_s: float,
        is_settled: Callable[[str], bool],
        candidates: Callable[[], Collection[str] | None],
    ) -> str | None:
        """Returns the digest to prefetch now, or None.

        `is_settled`: it is resident, or waited for. `candidates` are the images of which one would
        be evicted for it; None if nothing would.
        """
        if self.current or self._next_check_s is None or now_s < self._next_check_s:
            return None
        if (wait_s := self.budget.wait_s(now_s)) > 0:
            self._next_check_s = now_s + wait_s
            return None
        backoff = self._backoff_until_s
        self._backoff_until_s = {d: until_s for d, until_s in backoff.items() if until_s > now_s}
        found = self.popularity.hottest(
            now_s, lambda d: d not in self._backoff_until_s and not is_settled(d), MIN_SCORE
        )
        if found is None or found[1] < self._least_score(candidates(), now_s):
            self._next_check_s = min(self._backoff_until_s.values(), default=None)
            return None
        self.current = found[0]
        return self.current

    def hotter_than(self, digest: str, others: Collection[str], now_s: float) -> set[str]:
        """Returns the digests of `others` that must not be evicted for `digest`."""
        score = self.popularity.score(digest, now_s)
        return {other for other in others if self._displacing_score(other, now_s) > score}

    def next_check_s(self) -> float | None:
        """Returns when `choose` is to be called again; None: not before the next event."""
        return None if self.current else self._next_check_s

    def _least_score(self, candidates: Collection[str] | None, now_s: float) -> float:
        if candidates is None:
            return 0.0
        return min((self._displacing_score(d, now_s) for d in candidates), default=math.inf)

    def _displacing_score(self, digest: str, now_s: float) -> float:
        """Returns the score that is needed to displace it."""
        return MARGIN * self.popularity.score(digest, now_s)

    def _schedule_check(self, now_s: float) -> None:
        if self._next_check_s is None or self._next_check_s > now_s + CHECK_INTERVAL_S:
            self._next_check_s = now_s + CHECK_INTERVAL_S

    # The outcome.

    def on_opened(self, num_bytes: int, now_s: float) -> None:
        """Records that the current one has memory, and is being pulled."""
        self.budget.take(num_bytes, now_s)
        self._current_bytes = num_bytes
        self.counters.prefetched += 1
        self.counters.prefetched_bytes += num_bytes

    def on_pulled(self, now_s: float) -> None:
        """Records that the current one is complete."""
        self.unused[self.current] = self._current_bytes
        self._end_current(now_s)

    def on_refused(self, now_s: float) -> None:
        """Records that nothing less popular could be evicted for the current one, or that its pull
        failed."""
        self.counters.wasted_bytes += self._current_bytes
        self._backoff_until_s[self.current] = now_s + BACKOFF_S
        self._end_current(now_s)

    def on_evicted(self, digest: str) -> None:
        self.counters.wasted_bytes += self.unused.pop(digest, 0)

    def forget(self, digest: str) -> None:
        """Makes it unpopular: it cannot be loaded, an operator has unloaded it, or no name points
        to it any more."""
        self.popularity.forget(digest)

    def _end_current(self, now_s: float) -> None:
        self.current, self._current_bytes = "", 0
        self._next_check_s = now_s


@dataclass
class Prefetcher:
    """Carries out the choices of `policy`; None: nothing is prefetched."""

    policy: PrefetchPolicy | None
    tiers: MemoryTiers
    loads: Loads
    placement: Placement
    waiters: Counter[str]

    @property
    def counters(self) -> PrefetchCounters:
        return PrefetchCounters() if self.policy is None else self.policy.counters

    def choose(self, now_s: float) -> str | None:
        """Returns the digest to prefetch now, or None; always None while something is loading that
        requests wait for."""
        if self.policy is None or self.loads.by_digest:
            return None
        candidates = partial(self.tiers.pull_tier.eviction_candidates, self.waiters)
        return self.policy.choose(now_s, self._is_settled, candidates)

    def next_check_s(self) -> float | None:
        """Returns when `choose` is to be called again; None: not before the next event."""
        if self.policy is None or self.loads.by_digest:
            return None
        return self.policy.next_check_s()

    def is_prefetching(self, digest: str) -> bool:
        """Returns whether it is on its way without a waiter."""
        return self.policy is not None and self.policy.current == digest

    def reserve(self, digest: str, load: Load, now_s: float) -> bool:
        """Reserves memory for the current one: free memory, or the memory of images that are less
        popular and not waited for. Returns whether there was any."""
        assert self.policy is not None
        assert load.header is not None
        others = {resident.digest for resident in self.tiers.pull_tier.residents()}
        keep = self.policy.hotter_than(digest, others, now_s) | self.waiters.keys()
        evicted = self.placement.reserve(digest, load, keep, now_s, EvictionReason.PREFETCH)
        if evicted is None:
            return False
        self.on_evicted(resident.digest for resident in evicted)
        self.policy.on_opened(load.header.total_bytes, now_s)
        return True

    def on_request(self, digest: str, now_s: float, *, count: bool) -> None:
        if self.policy is not None:
            self.policy.on_request(digest, now_s, count=count)

    def on_repointed(self, old_digest: str, new_digest: str, now_s: float) -> None:
        if self.policy is not None:
            self.policy.on_repointed(old_digest, new_digest, now_s)

    def on_expected(self, digest: str, now_s: float) -> None:
        """Counts the requests that an operator expects, as one."""
        if self.policy is not None:
            self.policy.popularity.record(digest, now_s)

    def on_superseded(self, digest: str) -> None:
        """Records that no name points to it any more: its requests will go to other images."""
        if self.policy is not None:
            self.policy.forget(digest)

    def record_pull(self, num_bytes: int, seconds: float) -> None:
        """Measures the rate by any pull."""
        if self.policy is not None:
            self.policy.budget.record_pull(num_bytes, seconds)

    def on_pulled(self, resident: Resident, now_s: float) -> None:
        """Records that the current one is complete; from a host tier it is copied to the arena if
        that evicts nothing."""
        assert self.policy is not None
        self.policy.on_pulled(now_s)
        tiers = self.tiers
        if tiers.host is None:
            return
        others = {other.digest for other in tiers.device.residents()}
        reservation = tiers.reserve_on_device(
            resident.header, others, (), reason=EvictionReason.PREFETCH
        )
        if reservation is not None:
            tiers.pin_on_host(resident.digest)
            tiers.start_copy(resident, reservation.resident, now_s, None)

    def on_failed(self, digest: str, now_s: float, *, is_cancelled: bool) -> None:
        """Records that a load has ended without an image."""
        if self.policy is None:
            return
        if not is_cancelled:
            self.policy.forget(digest)
        if self.is_prefetching(digest):
            self.policy.on_refused(now_s)

    def on_evicted(self, digests: Iterable[str]) -> None:
        """Records evictions from either tier; in the pull tier they waste prefetched bytes."""
        if self.policy is not None:
            for digest in digests:
                if digest not in self.tiers.pull_tier:
                    self.policy.on_evicted(digest)

    def on_removed(self, digest: str) -> None:
        """Records that an operator unloaded it, or that it cannot be used: it is not prefetched
        before another request."""
        if self.policy is not None:
            self.policy.forget(digest)
            self.policy.on_evicted(digest)

    def _is_settled(self, digest: str) -> bool:
        """Returns whether it is here, or waited for: by those who are to be told of a failure."""
        is_here = digest in self.tiers.pull_tier or digest in self.tiers.device
        return is_here or digest in self.waiters

    def check_integrity(self) -> None:
        """Asserts that prefetched images are loading, or resident and unused."""
        if self.policy is None:
            return
        assert all(digest in self.tiers.pull_tier for digest in self.policy.unused)
        if self.policy.current:
            assert self.policy.current in self.loads, "prefetches nothing"
            assert self.policy.current not in self.waiters, "prefetches an image that is waited for"
