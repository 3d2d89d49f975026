"""Counts by adapter: the busiest by name, all others together, so that series are bounded.

No sum over all rows ever falls, and no row but one that begins anew does:

- A named adapter keeps its name until another one is clearly busier, and what it had counted then
  goes to FORMER: not to OTHER, whose rate would show it as a burst.
- It is shown once more when it leaves, and the new one is shown at 0 first: rates miss nothing.
- One that comes back begins at 0, as all do after a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from inference_svc.adapters.popularity import Popularity

BASE, OTHER, FORMER = "base", "other", "former"
"""Adapters are tenant/name or a digest: none is called so."""
MARGIN = 1.5
"""By how much another one must be busier: else two equals would take turns."""
MIN_SCORE = 1.0
"""Requests, weighted by age, below which nobody takes a name from another."""
REVIEW_S = 60.0
"""Between two reviews of who is named."""
MAX_MOVES = 10
"""Names that change hands in one review."""


@dataclass(slots=True)
class AdapterCounts:
    """Of requests that ended. All fields only go up."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    load_waits: int = 0
    load_wait_seconds: float = 0.0

    def add(self, other: AdapterCounts) -> None:
        for field in fields(AdapterCounts):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class BusiestAdapters:
    """At most `max_named` by name. May be used from any thread."""

    def __init__(self, max_named: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_named = max_named
        self._clock = clock
        self._lock = threading.Lock()
        self._popularity = Popularity()
        self._named: dict[str, AdapterCounts] = {}
        self._base, self._other, self._former = (AdapterCounts() for _ in range(3))
        self._reviewed_s = clock()

    def count(self, adapter: str, counts: AdapterCounts) -> None:
        """One request has ended; "" is the base model's."""
        with self._lock:
            self._row(adapter).add(counts)

    def _row(self, adapter: str) -> AdapterCounts:
        if not adapter:
            return self._base
        self._popularity.record(adapter, self._clock())
        if adapter not in self._named and len(self._named) < self._max_named:
            self._named[adapter] = AdapterCounts()
        return self._named.get(adapter, self._other)

    def rows(self) -> dict[str, AdapterCounts]:
        """What is to be shown now; now and then this changes who is named."""
        with self._lock:
            leaving, coming = self._review()
            self._named |= {adapter: AdapterCounts() for adapter in coming}
            rows = {adapter: replace(counts) for adapter, counts in self._named.items()}
            rows |= {BASE: replace(self._base), OTHER: replace(self._other)}
            rows[FORMER] = replace(self._former)
            for adapter in leaving:
                self._former.add(self._named.pop(adapter))
        return rows

    def _review(self) -> tuple[list[str], list[str]]:
        """Who loses its name, and to whom: the least busy, to those clearly busier."""
        now_s = self._clock()
        if now_s - self._reviewed_s < REVIEW_S or not self._named:
            return [], []
        self._reviewed_s = now_s
        leaving: list[str] = []
        coming: list[str] = []
        scores = {adapter: self._popularity.score(adapter, now_s) for adapter in self._named}
        for adapter in sorted(scores, key=scores.__getitem__)[:MAX_MOVES]:
            at_least = max(MIN_SCORE, MARGIN * scores[adapter])
            found = self._popularity.hottest(now_s, self._is_new_to(coming), at_least)
            if found is None:
                break
            leaving.append(adapter)
            coming.append(found[0])
        return leaving, coming

    def _is_new_to(self, coming: list[str]) -> Callable[[str], bool]:
        return lambda adapter: adapter not in self._named and adapter not in coming
