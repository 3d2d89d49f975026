"""What to bring before anybody asks for it, within a share of the bandwidth.

Plain policy over plain data: whoever owns the memory asks `choose` when nothing that requests wait
for is on its way, and tells what became of it. Time comes with every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from inference_svc.adapters.popularity import Popularity

SHARE = 0.25
"""Of the measured pull rate, for prefetching."""
FIRST_RATE = 200e6
"""Bytes per second that pulls are taken to run at before one was measured."""
RATE_WEIGHT = 0.2
"""Of the newest measurement of the rate."""
BURST_S = 1.0
"""Budget that is saved up while there is nothing to prefetch."""
MIN_SCORE = 0.5
"""Requests, weighted by age: one, if it is not older than a half-life."""
MARGIN = 1.5
"""By how much what is brought must be more popular than what it displaces: else two equals would
take turns for ever."""
LOOK_S = 0.25
"""Between two looks for something to bring."""
REST_S = 10.0
"""What found no room is left alone for so long."""


class ByteBudget:
    """A token bucket of bytes, filled at `share` of the measured pull rate.

    It may go into debt by one image, so that one larger than the bucket gets its turn: within any
    T seconds it grants at most `share * rate * (T + BURST_S)` bytes and one image.
    """

    def __init__(self, share: float = SHARE, rate: float = FIRST_RATE) -> None:
        assert 0 < share <= 1
        self.share = share
        self.rate = rate
        self._level = 0.0
        self._filled_s: float | None = None

    def measured(self, num_bytes: int, seconds: float) -> None:
        """A pull of `num_bytes` took `seconds`."""
        if num_bytes > 0 and seconds > 0:
            self.rate += RATE_WEIGHT * (num_bytes / seconds - self.rate)

    def take(self, num_bytes: int, now_s: float) -> None:
        self._fill(now_s)
        self._level -= num_bytes

    def wait_s(self, now_s: float) -> float:
        """How long until something may be taken; 0: now."""
        self._fill(now_s)
        return max(0.0, -self._level) / (self.share * self.rate)

    def _fill(self, now_s: float) -> None:
        if self._filled_s is not None:
            fill = self.share * self.rate * max(0.0, now_s - self._filled_s)
            self._level = min(self._level + fill, self.share * self.rate * BURST_S)
        self._filled_s = now_s


@dataclass
class PrefetchCounters:
    """Monotonic: images whose bytes were brought ahead, and how many bytes; those that a request
    then found, or found on their way; bytes that left or failed before one did."""

    prefetched: int = 0
    prefetched_bytes: int = 0
    hits: int = 0
    wasted_bytes: int = 0


@dataclass
class Prefetch:
    """One image at a time is on its way, `current`. `brought` are those not yet asked for, with
    their bytes."""

    popularity: Popularity = field(default_factory=Popularity)
    budget: ByteBudget = field(default_factory=ByteBudget)
    counters: PrefetchCounters = field(default_factory=PrefetchCounters)
    current: str = ""
    brought: dict[str, int] = field(default_factory=dict)
    _current_bytes: int = 0
    _resting: dict[str, float] = field(default_factory=dict)
    _next_look_s: float | None = None

    # What is heard of the traffic.

    def wanted(self, digest: str, now_s: float, *, count: bool = True) -> None:
        """Somebody asks for it; if it is on its way, it is theirs from now on. `count`: it is a
        request, of which there may be more."""
        if count:
            self.popularity.note(digest, now_s)
        if self.brought.pop(digest, None) is not None:
            self.counters.hits += 1
        if digest == self.current:
            self.counters.hits += self._current_bytes > 0
            self._ended(now_s)
        self._look_at(now_s)

    def on_repointed(self, old_digest: str, new_digest: str, now_s: float) -> None:
        """A name that pointed to one now points to the other."""
        self.popularity.inherit(new_digest, old_digest)
        self._resting.pop(new_digest, None)
        self._look_at(now_s)

    # What to bring.

    def choose(
        self,
        now_s: float,
        is_here: Callable[[str], bool],
        victims: Callable[[], Collection[str] | None],
    ) -> str | None:
        """The digest to bring now, or None. `is_here`: it is there or on its way. `victims`: of
        what might leave for it, one would have to; None if there is free room."""
        if self.current or self._next_look_s is None or now_s < self._next_look_s:
            return None
        if (wait_s := self.budget.wait_s(now_s)) > 0:
            self._next_look_s = now_s + wait_s
            return None
        self._resting = {d: until_s for d, until_s in self._resting.items() if until_s > now_s}
        found = self.popularity.hottest(
            now_s, lambda digest: digest not in self._resting and not is_here(digest), MIN_SCORE
        )
        if found is None or found[1] < self._floor(victims(), now_s):
            self._next_look_s = min(self._resting.values(), default=None)
            return None
        self.current = found[0]
        return self.current

    def hotter_than(self, digest: str, others: Collection[str], now_s: float) -> set[str]:
        """Of `others`, what must not leave for the sake of `digest`."""
        score = self.popularity.score(digest, now_s)
        return {other for other in others if self._displaces(other, now_s) > score}

    def next_look_s(self) -> float | None:
        """When `choose` is to be called again; None: not before something is heard."""
        return None if self.current else self._next_look_s

    def _floor(self, victims: Collection[str] | None, now_s: float) -> float:
        if victims is None:
            return 0.0
        return min((self._displaces(victim, now_s) for victim in victims), default=math.inf)

    def _displaces(self, digest: str, now_s: float) -> float:
        """The score that is needed to take its place."""
        return MARGIN * self.popularity.score(digest, now_s)

    def _look_at(self, now_s: float) -> None:
        if self._next_look_s is None or self._next_look_s > now_s + LOOK_S:
            self._next_look_s = now_s + LOOK_S

    # What becomes of it.

    def opened(self, num_bytes: int, now_s: float) -> None:
        """The current one has got room, and is being pulled."""
        self.budget.take(num_bytes, now_s)
        self._current_bytes = num_bytes
        self.counters.prefetched += 1
        self.counters.prefetched_bytes += num_bytes

    def arrived(self, now_s: float) -> None:
        """The current one is there."""
        self.brought[self.current] = self._current_bytes
        self._ended(now_s)

    def refused(self, now_s: float) -> None:
        """There was no room for the current one among what is less popular, or its pull ended."""
        self.counters.wasted_bytes += self._current_bytes
        self._resting[self.current] = now_s + REST_S
        self._ended(now_s)

    def left(self, digest: str) -> None:
        """It has been evicted or unloaded."""
        self.counters.wasted_bytes += self.brought.pop(digest, 0)

    def forget(self, digest: str) -> None:
        """It cannot be loaded, or an operator has unloaded it: it is not brought back unasked."""
        self.popularity.forget(digest)

    def _ended(self, now_s: float) -> None:
        self.current, self._current_bytes = "", 0
        self._next_look_s = now_s
