"""Recent rates of the engine: moving averages that admission predicts waits from."""

from __future__ import annotations

import math
from collections.abc import Iterable

from inference_svc.core import Batch
from inference_svc.engine.transport.messages import Output

WINDOW_S = 10.0
"""The busy seconds after which a measurement counts for 1/e."""
MIN_SAMPLES = 4.0
"""The weight of finished requests below which a rate is unknown."""


class Throughput:
    """Tokens and requests per busy second, and generated tokens per request, weighted
    exponentially.

    Busy is the time between two steps of which the first left something to run.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._ended = 0.0
        self._answered = 0.0
        self._generated = 0.0
        self._last_s = math.inf

    def observe(
        self, batch: Batch, outputs: Iterable[Output], now_s: float, *, is_busy: bool
    ) -> None:
        """Adds a settled step. `is_busy`: a sequence still runs."""
        elapsed_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s if is_busy else math.inf
        if elapsed_s:
            decay = math.exp(-elapsed_s / WINDOW_S)
            self._seconds = self._seconds * decay + elapsed_s
            self._tokens *= decay
            self._ended *= decay
            self._answered *= decay
            self._generated *= decay
        self._tokens += sum(row.num_tokens for row in batch.rows)
        ended = [output for output in outputs if output.usage is not None]
        self._ended += len(ended)
        if batch.pools:  # prompts that are pooled tell nothing of the length of answers
            sequences = (row.sequence for row in batch.rows)
            pooled = {each.request.request_id for each in sequences if each.end_pooled}
            ended = [output for output in ended if output.request_id not in pooled]
        self._answered += len(ended)
        self._generated += sum(output.usage.completion_tokens for output in ended if output.usage)

    @property
    def is_known(self) -> bool:
        return self._ended >= MIN_SAMPLES and self._seconds > 0

    @property
    def tokens_per_s(self) -> float:
        """Prompt and generated tokens; only if `is_known`."""
        return self._tokens / self._seconds

    @property
    def requests_per_s(self) -> float:
        """Requests that end; only if `is_known`."""
        return self._ended / self._seconds

    @property
    def generated_per_request(self) -> float:
        """Tokens of a request that generates; only if `is_known`."""
        return self._generated / self._answered if self._answered else 0.0


START_WINDOW = 32.0
"""The number of starts after which a measurement counts for 1/e."""


class PrefixMissRatio:
    """The share of the tokens of starting sequences that is not in the prefix cache, over all
    requests, weighted exponentially; 1 before any has started."""

    def __init__(self) -> None:
        self._known = 0.0
        self._computed = 0.0

    def observe(self, num_known: int, num_computed: int) -> None:
        """Adds a sequence that starts."""
        decay = math.exp(-1 / START_WINDOW)
        self._known = self._known * decay + num_known
        self._computed = self._computed * decay + num_computed

    @property
    def value(self) -> float:
        return self._computed / self._known if self._known else 1.0


class DepartureRate:
    """How many requests leave a queue per second in which it is not empty, weighted
    exponentially."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._left = 0.0
        self._last_s = math.inf
        self._total = 0

    def observe(self, total: int, now_s: float, *, is_waiting: bool) -> None:
        """Updates the total number that have left. `is_waiting`: the queue is not empty now."""
        elapsed_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s if is_waiting else math.inf
        if elapsed_s:
            decay = math.exp(-elapsed_s / WINDOW_S)
            self._seconds = self._seconds * decay + elapsed_s
            self._left *= decay
        self._left += total - self._total
        self._total = total

    @property
    def per_s(self) -> float | None:
        """None while too few have left."""
        is_known = self._total >= MIN_SAMPLES and self._seconds > 0
        return self._left / self._seconds if is_known else None
