"""How often each adapter has been asked for lately: an exponentially weighted count per digest."""

from __future__ import annotations

import math
from collections.abc import Callable

HALF_LIFE_S = 300.0
MAX_TRACKED = 4096
"""The least popular are forgotten beyond this: a search goes through all that are known."""

_REBASE_EXPONENT = 512.0  # scores grow with time instead of shrinking; before they overflow


class Popularity:
    """A request counts 1 when it comes and half of it `half_life_s` later.

    Scores are kept at the value that they had at a common moment: all fade alike, so that their
    order never changes by waiting, and nothing is to be updated as time passes.
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

    def note(self, digest: str, now_s: float) -> None:
        """One more request. `now_s` may go back a little, never by a rebase."""
        one = self._one(now_s)
        self._weights[digest] = self._weight(digest) + one
        if len(self._weights) > self._max_tracked:
            self._forget_a_quarter()

    def inherit(self, digest: str, from_digest: str) -> None:
        """A name moved to `digest`: it will be asked for as often as what it replaces, which keeps
        its own, for those who ask for it by version or digest, and fades."""
        self._weights[digest] = max(self._weight(digest), self._weight(from_digest))

    def forget(self, digest: str) -> None:
        self._weights.pop(digest, None)

    def score(self, digest: str, now_s: float) -> float:
        """The weighted count at `now_s`; 0 for what is not known."""
        one = self._one(now_s)
        return self._weight(digest) / one

    def hottest(
        self, now_s: float, is_wanted: Callable[[str], bool], least: float = 0.0
    ) -> tuple[str, float] | None:
        """The most popular digest of those that are wanted and have a score of at least `least`,
        with its score. Only those that would lead are asked about: of thousands, few."""
        one = self._one(now_s)
        found, best = None, least * one
        # The newest first: of those that were asked for once, each outweighs all before it.
        for digest, weight in reversed(self._weights.items()):
            if weight >= best and (found is None or weight > best) and is_wanted(digest):
                found, best = digest, weight
        return None if found is None else (found, best / one)

    def _weight(self, digest: str) -> float:
        return self._weights.get(digest, 0.0)

    def _one(self, now_s: float) -> float:
        """The weight of a request at `now_s`. Weights read before may be on another scale."""
        if self._base_s is None:
            self._base_s = now_s
        exponent = (now_s - self._base_s) / self._half_life_s
        if exponent > _REBASE_EXPONENT:
            scale = math.exp2(-min(exponent, 1000.0))
            self._weights = {d: w * scale for d, w in self._weights.items() if w * scale > 0}
            self._base_s, exponent = now_s, 0.0
        return math.exp2(exponent)

    def _forget_a_quarter(self) -> None:
        ascending = sorted(self._weights.items(), key=lambda item: item[1])
        self._weights = dict(ascending[len(ascending) - self._max_tracked * 3 // 4 :])
