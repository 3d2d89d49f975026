"""Whether served log probabilities are the reference's, up to rounding.

The reference computes twice: in fp32, and in the service's dtype. The difference of both is the
rounding that is normal for this model. The service sums in another order, so its base model may
differ by BASE_FACTOR times the rounding. The adapter may differ by FACTOR times the rounding, or by
more in proportion if the base model differs by more than the rounding. With a real model in bf16,
an adapter that has lost one of thirty layers differs by 1.7 times the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BASE_FACTOR = 1.5
FACTOR = 1.4
MIN_ROUNDING = 5e-4
"""In nats: the least that is taken for rounding, as in fp32, where both references are the same."""
TOKEN_FACTOR = 8.0
"""A token may differ if its log probability is at most this many accepted errors below the best
token's: the largest of some hundred errors is far above their root mean square."""
MIN_EFFECT = 3.0
"""An adapter must change log probabilities by this many times the accepted error, or nothing is
proven."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Positions:
    """Log probabilities at some positions, [positions, tokens], all of the same tokens."""

    served: Values
    exact: Values
    """The reference's in fp32."""
    rounded: Values
    """The reference's in the service's dtype."""
    base: Values
    """The reference's in fp32, without the adapter."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Root mean squares of differences of log probabilities, in nats."""

    error: float
    """Served from reference."""
    rounding: float
    """Reference in the service's dtype from reference in fp32."""
    effect: float
    """Reference with the adapter from reference without."""
    scale: float
    """How far the served adapter goes from the base model, as a multiple of the reference's."""

    accepted: float
    """The largest error that rounding explains."""

    @property
    def is_equal(self) -> bool:
        return self.error <= self.accepted

    @property
    def has_effect(self) -> bool:
        return self.effect >= MIN_EFFECT * self.accepted


def measure(parts: Sequence[Positions], base_model: Measured | None = None) -> Measured:
    """Returns the differences over all positions of some prompts.

    Args:
        parts: The positions of each prompt.
        base_model: The differences of the base model, for an adapter's. None: these are its own.
    """
    served, exact, rounded, base = (
        np.concatenate([getattr(part, name).ravel() for part in parts])
        for name in ("served", "exact", "rounded", "base")
    )
    moved = exact - base
    square = float(moved @ moved)
    rounding = max(_rms(rounded - exact), MIN_ROUNDING)
    factor = BASE_FACTOR
    if base_model is not None:
        factor = FACTOR * max(1.0, base_model.error / base_model.rounding)
    return Measured(
        error=_rms(served - exact),
        rounding=rounding,
        effect=_rms(moved),
        scale=float((served - base) @ moved) / square if square else 0.0,
        accepted=factor * rounding,
    )


def num_other_tokens(gaps: Values, accepted: float) -> tuple[int, int]:
    """Returns how many tokens of an answer are not the reference's most likely ones: those that
    rounding explains, and the others.

    Args:
        gaps: How much more likely the reference's own token is, in nats, [tokens].
        accepted: The accepted error, in nats.
    """
    others = gaps[gaps > 0]
    near = int((others <= TOKEN_FACTOR * accepted).sum())
    return near, len(others) - near


def _rms(values: Values) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
