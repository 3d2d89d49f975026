"""Whether served log probabilities are the reference's, up to rounding.

The reference computes twice: in fp32, and in the service's dtype. The difference of both is the
rounding that is normal for this model, and the service may have FACTOR times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FACTOR = 2.0
"""How much more than the reference's own rounding is accepted: orders of sums differ."""
MIN_ROUNDING = 5e-4
"""In nats, for fp32, where both of the reference are the same."""
TOKEN_FACTOR = 8.0
"""A token may be another one if the reference has it this many times the accepted error below its
own: the largest of some hundred errors, not their root mean square."""
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

    @property
    def accepted(self) -> float:
        return FACTOR * max(self.rounding, MIN_ROUNDING)

    @property
    def is_equal(self) -> bool:
        return self.error <= self.accepted

    @property
    def has_effect(self) -> bool:
        return self.effect >= MIN_EFFECT * self.accepted


def measure(parts: Sequence[Positions]) -> Measured:
    """Returns the differences over all positions of some prompts."""
    served, exact, rounded, base = (
        np.concatenate([getattr(part, name).ravel() for part in parts])
        for name in ("served", "exact", "rounded", "base")
    )
    moved = exact - base
    square = float(moved @ moved)
    return Measured(
        error=_rms(served - exact),
        rounding=_rms(rounded - exact),
        effect=_rms(moved),
        scale=float((served - base) @ moved) / square if square else 0.0,
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
