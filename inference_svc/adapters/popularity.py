"""How often each adapter was requested lately: an exponentially weighted count per digest."""

from __future__ import annotations

import math
from collections.abc import Callable

HALF_LIFE_S = 300.0
MAX_TRACKED = 4096
"""Digests tracked before the least popular are dropped: a search goes through all of them."""

_REBASE_EXPONENT = 512.0  # scores grow with time instead of shrinking; before they overflow


class Popularity:
    """A request counts 1 when it arrives and half of it `half_life_s` later.

    Scores are stored as of a common moment: all fade alike, so that their order does not change
    with time, and nothing is updated as it passes.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, max_tracked: int = MAX_TRACKED) -> None:
        assert half_life_s > 0
        assert max_tracked > 0
        self._half_life_s = half_life_s
        self._max_tracked = max_tracked
        self._base_s: float | None = None
        self._weights: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def record(self, digest: str, now_s: float) -> None:
        """Records a request. `now_s` may go back a little, never by a rebase."""
        unit = self._unit(now_s)
        self._weights[digest] = self._weight(digest) + unit
        if len(self._weights) > self._max_tracked:
            self._drop_least_popular()

    def inherit(self, digest: str, from_digest: str) -> None:
        """Makes `digest`, to which a name moved, as popular as the digest that it replaces. That
        keeps its own score, for requests by version or digest, and fades."""
        self._weights[digest] = max(self._weight(digest), self._weight(from_digest))

    def forget(self, digest: str) -> None:
        self._weights.pop(digest, None)

    def score(self, digest: str, now_s: float) -> float:
        """Returns the weighted count at `now_s`; 0 for an unknown digest."""
        unit = self._unit(now_s)
        return self._weight(digest) / unit

    def hottest(
        self, now_s: float, is_eligible: Callable[[str], bool], least: float = 0.0
    ) -> tuple[str, float] | None:
        """Returns the most popular eligible digest with a score of at least `least`, and its score.
        Calls `is_eligible` only for digests that would lead: of thousands, few."""
        unit = self._unit(now_s)
        found, best = None, least * unit
        # The newest first: of digests that were requested once, each outweighs all before it.
        for digest, weight in reversed(self._weights.items()):
            if weight >= best and (found is None or weight > best) and is_eligible(digest):
                found, best = digest, weight
        return None if found is None else (found, best / unit)

    def _weight(self, digest: str) -> float:
        return self._weights.get(digest, 0.0)

    def _unit(self, now_s: float) -> float:
        """Returns the weight of a request at `now_s`; a weight read before may be rescaled."""
        if self._base_s is None:
            self._base_s = now_s
        exponent = (now_s - self._base_s) / self._half_life_s
        if exponent > _REBASE_EXPONENT:
            scale = math.exp2(-min(exponent, 1000.0))
            self._weights = {d: w * scale for d, w in self._weights.items() if w * scale > 0}
            self._base_s, exponent = now_s, 0.0
        return math.exp2(exponent)

    def _drop_least_popular(self) -> None:
        ascending = sorted(self._weights.items(), key=lambda item: item[1])
        self._weights = dict(ascending[len(ascending) - self._max_tracked * 3 // 4 :])
