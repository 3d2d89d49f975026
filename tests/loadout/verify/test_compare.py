"""When served log probabilities are the reference's, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest

from loadout.verify.compare import (
    BASE_FACTOR,
    FACTOR,
    MIN_ROUNDING,
    Measured,
    Positions,
    measure,
    num_other_tokens,
)


def positions(error: float, rounding: float, effect: float = 0.0) -> Positions:
    """Log probabilities that differ by as much everywhere, up and down in turn."""
    signs = np.where(np.arange(40).reshape(10, 4) % 2, 1.0, -1.0)
    exact = np.full((10, 4), -3.0)
    return Positions(exact + error * signs, exact, exact - rounding * signs, exact - effect)


def base(error: float, rounding: float) -> Measured:
    return measure([positions(error, rounding)])


def test_a_base_model_may_differ_by_more_than_its_rounding() -> None:
    assert base(0.14, 0.1).is_equal
    assert not base(0.16, 0.1).is_equal
    assert base(0.1, 0.1).accepted == pytest.approx(BASE_FACTOR * 0.1)


@pytest.mark.parametrize(
    ("base_error", "accepted"), [(0.05, FACTOR), (0.1, FACTOR), (0.15, 1.5 * FACTOR)]
)
def test_an_adapter_may_round_as_the_base_model_does(base_error: float, accepted: float) -> None:
    found = measure([positions(0.1, 0.1, effect=1.0)], base(base_error, 0.1))
    assert found.accepted == pytest.approx(accepted * 0.1)
    assert found.has_effect


def test_equal_references_leave_the_least_rounding() -> None:
    assert base(0.0, 0.0).rounding == MIN_ROUNDING
    assert not base(3 * MIN_ROUNDING, 0.0).is_equal


def test_no_numbers_are_not_equal() -> None:
    assert not base(float("nan"), 0.1).is_equal


def test_the_scale_of_the_served_adapter() -> None:
    half = positions(0.0, 0.1, effect=1.0)
    half = Positions(half.base + 0.5, half.exact, half.rounded, half.base)
    assert measure([half], base(0.1, 0.1)).scale == pytest.approx(0.5)


def test_an_adapter_without_effect_proves_nothing() -> None:
    assert not measure([positions(0.0, 0.1, effect=0.1)], base(0.1, 0.1)).has_effect


def test_other_tokens_are_near_or_far() -> None:
    gaps = np.array([0.0, 0.0, 0.05, 0.79, 0.81, 3.0])
    assert num_other_tokens(gaps, accepted=0.1) == (2, 2)
