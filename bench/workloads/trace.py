"""The S-LoRA generator of requests: their arrival times, and an adapter of n for each."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and outputs in tokens, uniform in [low, high)."""

    num_in: tuple[int, int] = (8, 128)
    num_out: tuple[int, int] = (8, 64)

    @property
    def mean_out(self) -> float:
        return (self.num_out[0] + self.num_out[1] - 1) / 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request's arrival, `at_s` after the start; `adapter` is in [0, n), or None for the base."""

    at_s: float
    adapter: int | None
    num_in: int
    num_out: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic for n = `num_adapters` adapters, or for the base model alone if 0.

    Popularity is adapter = floor(n * U^(1/alpha)): alpha 1 is uniform, and smaller values are
    skewed. Arrivals are a Gamma process with coefficient of variation `cv` and `rate` requests per
    second; an infinite rate sends all at once.
    """

    num_adapters: int
    alpha: float = 1.0
    rate: float = math.inf
    cv: float = 1.0
    lengths: Lengths = Lengths()

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """Yields arrivals endlessly; a seed draws the same lengths and popularity for every n."""
        draw, gaps = random.Random(seed), random.Random(~seed)
        shape = 1 / self.cv**2
        at_s = 0.0
        while True:
            if math.isfinite(self.rate):
                at_s += gaps.gammavariate(shape, 1 / (shape * self.rate))
            popularity = draw.random() ** (1 / self.alpha)
            num_in = draw.randrange(*self.lengths.num_in)
            num_out = draw.randrange(*self.lengths.num_out)
            adapter = int(self.num_adapters * popularity) if self.num_adapters else None
            yield Arrival(at_s, adapter, num_in, num_out)
