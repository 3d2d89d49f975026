"""How fast the engine has worked lately."""

from __future__ import annotations

import math
from collections.abc import Iterable

from inference_svc.core import Batch
from inference_svc.engine.messages import Output

WINDOW_S = 10.0
"""Busy seconds after which a measurement counts for 1/e."""
ENOUGH = 4.0
"""Requests that must have ended, so counted, before anything is said."""


class Pace:
    """Tokens and requests per busy second, and what a request generates, weighted exponentially.

    Busy is the time between two steps of which the first left something to run.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._ended = 0.0
        self._generated = 0.0
        self._last_s = math.inf

    def note(self, batch: Batch, outputs: Iterable[Output], now_s: float, *, is_busy: bool) -> None:
        """A step has been accounted for. `is_busy`: something still runs."""
        elapsed_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s if is_busy else math.inf
        if elapsed_s:
            kept = math.exp(-elapsed_s / WINDOW_S)
            self._seconds = self._seconds * kept + elapsed_s
            self._tokens *= kept
            self._ended *= kept
            self._generated *= kept
        self._tokens += sum(row.num_tokens for row in batch.rows)
        ended = [output.usage for output in outputs if output.usage is not None]
        self._ended += len(ended)
        self._generated += sum(usage.completion_tokens for usage in ended)

    @property
    def is_known(self) -> bool:
        return self._ended >= ENOUGH and self._seconds > 0

    @property
    def tokens_per_s(self) -> float:
        """Prompt and generated tokens, only if `is_known`."""
        return self._tokens / self._seconds

    @property
    def requests_per_s(self) -> float:
        """That end, only if `is_known`."""
        return self._ended / self._seconds

    @property
    def generated_per_request(self) -> float:
        """In tokens, only if `is_known`."""
        return self._generated / self._ended


STARTS = 32.0
"""Starts after which a measurement counts for 1/e."""


class ComputedShare:
    """The part of what sequences know at their start that is computed then: the rest is in the
    prefix cache. Of everybody together, weighted exponentially; 1 before anything has started."""

    def __init__(self) -> None:
        self._known = 0.0
        self._computed = 0.0

    def note(self, num_known: int, num_computed: int) -> None:
        """A sequence starts."""
        kept = math.exp(-1 / STARTS)
        self._known = self._known * kept + num_known
        self._computed = self._computed * kept + num_computed

    @property
    def value(self) -> float:
        return self._computed / self._known if self._known else 1.0


class Departures:
    """How many leave per second of the time in which somebody waits, weighted exponentially."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._left = 0.0
        self._last_s = math.inf
        self._total = 0

    def note(self, total: int, now_s: float, *, is_waiting: bool) -> None:
        """So many have left in all. `is_waiting`: somebody waits from now on."""
        elapsed_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s if is_waiting else math.inf
        if elapsed_s:
            kept = math.exp(-elapsed_s / WINDOW_S)
            self._seconds = self._seconds * kept + elapsed_s
            self._left *= kept
        self._left += total - self._total
        self._total = total

    @property
    def per_s(self) -> float | None:
        """None while too few have left to say."""
        is_known = self._total >= ENOUGH and self._seconds > 0
        return self._left / self._seconds if is_known else None
