"""The S-LoRA generator: which requests come when, for which of n adapters."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens in and out are uniform in [low, high)."""

    num_in: tuple[int, int] = (8, 128)
    num_out: tuple[int, int] = (8, 64)

    @property
    def mean_out(self) -> float:
        return (self.num_out[0] + self.num_out[1] - 1) / 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s` after the trace's begin; `adapter` in [0, n), None for the base model."""

    at_s: float
    adapter: int | None
    num_in: int
    num_out: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """`num_adapters` n, 0 for the base model alone. Popularity: adapter = floor(n * U^(1/alpha)),
    so alpha 1 is uniform and smaller ones are skewed. Arrivals are a Gamma process of coefficient
    of variation `cv`; `rate` in requests per second, infinite for all at once."""

    num_adapters: int
    alpha: float = 1.0
    rate: float = math.inf
    cv: float = 1.0
    lengths: Lengths = Lengths()

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """Yields arrivals without end; for every n a seed draws lengths and popularity alike."""
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
