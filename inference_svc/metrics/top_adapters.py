"""Counts by adapter: the busiest by name, all others together, so that series are bounded.

No sum over all rows ever falls, and a row falls only when its adapter starts anew:

- A named adapter keeps its name until another one is clearly busier. Its counts then go to FORMER:
  in OTHER they would look like a burst.
- It is shown once more when it loses its name, and the new one is shown at 0 first, so that rates
  miss nothing.
- An adapter that gets its name back starts at 0, as all do after a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from prometheus_client.core import Metric

from inference_svc.adapters.popularity import Popularity
from inference_svc.metrics.definitions import DEFINITIONS

BASE, OTHER, FORMER = "base", "other", "former"
"""No adapter has such a name: they are tenant/name or a digest."""
MARGIN = 1.5
"""How many times busier another adapter must be, so that two equals do not alternate."""
MIN_SCORE = 1.0
"""Requests, weighted by age, that an adapter needs to replace another."""
REVIEW_S = 60.0
"""Time between two reviews of the names."""
MAX_MOVES = 10
"""Names replaced in one review."""


@dataclass(slots=True)
class AdapterCounts:
    """Counts requests that ended. All fields only grow."""

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


class TopAdapters:
    """Counts at most `max_named` adapters by name. May be used from any thread."""

    def __init__(self, max_named: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_named = max_named
        self._clock = clock
        self._lock = threading.Lock()
        self._popularity = Popularity()
        self._named: dict[str, AdapterCounts] = {}
        self._base, self._other, self._former = (AdapterCounts() for _ in range(3))
        self._reviewed_s = clock()

    def count(self, adapter: str, counts: AdapterCounts) -> None:
        """Adds a request that ended; "" is the base model's."""
        with self._lock:
            self._row(adapter).add(counts)

    def _row(self, adapter: str) -> AdapterCounts:
        if not adapter:
            return self._base
        self._popularity.record(adapter, self._clock())
        if adapter not in self._named and len(self._named) < self._max_named:
            self._named[adapter] = AdapterCounts()
        return self._named.get(adapter, self._other)

    def families(self) -> Iterator[Metric]:
        """Yields the families of a scrape."""
        requests, errors = _family("adapter_requests"), _family("adapter_errors")
        prompts, generated = _family("adapter_prompt_tokens"), _family("adapter_generated_tokens")
        first = _family("adapter_first_token_seconds")
        waits = _family("adapter_load_wait_seconds")
        for adapter, counts in self.rows().items():
            requests.add_metric([adapter], counts.requests)
            errors.add_metric([adapter], counts.errors)
            prompts.add_metric([adapter], counts.prompt_tokens)
            generated.add_metric([adapter], counts.generated_tokens)
            first.add_metric([adapter], counts.first_tokens, counts.first_token_seconds)
            waits.add_metric([adapter], counts.load_waits, counts.load_wait_seconds)
        yield from (requests, errors, prompts, generated, first, waits)

    def rows(self) -> dict[str, AdapterCounts]:
        """Returns the rows to show; when a review is due it replaces names."""
        with self._lock:
            removed, added = self._review()
            self._named |= {adapter: AdapterCounts() for adapter in added}
            rows = {adapter: replace(counts) for adapter, counts in self._named.items()}
            rows |= {BASE: replace(self._base), OTHER: replace(self._other)}
            rows[FORMER] = replace(self._former)
            for adapter in removed:
                self._former.add(self._named.pop(adapter))
        return rows

    def _review(self) -> tuple[list[str], list[str]]:
        """Returns the adapters that lose their names, least busy first, and those clearly busier
        that replace them."""
        now_s = self._clock()
        if now_s - self._reviewed_s < REVIEW_S or not self._named:
            return [], []
        self._reviewed_s = now_s
        removed: list[str] = []
        added: list[str] = []
        scores = {adapter: self._popularity.score(adapter, now_s) for adapter in self._named}
        for adapter in sorted(scores, key=scores.__getitem__)[:MAX_MOVES]:
            at_least = max(MIN_SCORE, MARGIN * scores[adapter])
            found = self._popularity.hottest(now_s, self._is_candidate(added), at_least)
            if found is None:
                break
            removed.append(adapter)
            added.append(found[0])
        return removed, added

    def _is_candidate(self, added: list[str]) -> Callable[[str], bool]:
        return lambda adapter: adapter not in self._named and adapter not in added


_family = DEFINITIONS.family
