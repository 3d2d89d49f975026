"""Rotary position embedding: the parameters in config.json, and their frequencies.

The formulas are those of transformers' `modeling_rope_utils`; only kinds whose frequencies do not
depend on the sequence's length so far are supported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel

_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class Rope:
    """One kind of rotary embedding; fields of other kinds keep their defaults."""

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Returns fp32 [head_dim / 2], on the CPU; position p rotates pair i by p * result[i]."""
        steps = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        plain = 1.0 / (self.rope_theta**steps)
        if self.rope_type == "linear":
            return plain / self.factor
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(self.rope_theta**steps, head_dim)
        return plain

    @property
    def attention_scaling(self) -> float:
        """The factor of cos and sin."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def _llama3(self, plain: Tensor) -> Tensor:
        """Stretches long waves by `factor`, leaves short ones, and interpolates between them."""
        context = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / plain
        is_long = wavelengths > context / self.low_freq_factor
        is_short = wavelengths < context / self.high_freq_factor
        smooth = (context / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * plain / self.factor + smooth * plain
        return torch.where(is_long, plain / self.factor, torch.where(is_short, plain, between))

    def _yarn(self, periods: Tensor, head_dim: int) -> Tensor:
        """Ramps over the dimensions, from original frequencies to those divided by `factor`."""

        def dimension(rotations: float) -> float:
            ratio = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(self.rope_theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float) - low) / (high - low)).clamp(0, 1)
        original = 1 - ramp
        return 1.0 / (self.factor * periods) * (1 - original) + 1.0 / periods * original


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def parse_rope(config: Mapping[str, Any], max_position_embeddings: int) -> Rope:
    """Reads `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

    Raises UnsupportedModel naming a kind, a key or a value that is not computed here.
    """
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    if not isinstance(values, Mapping):
        raise UnsupportedModel(f"config.json: {where} is not an object: {values!r}")
    kind = values.get("rope_type") or values.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModel(
            f"config.json: {where}.rope_type {kind!r} is not supported; "
            f"supported are {', '.join(_KEYS)}"
        )
    for key, value in values.items():
        if value is not None and key not in _KEYS[kind] | _COMMON_KEYS:
            raise UnsupportedModel(f"config.json: {where}.{key} is not supported for {kind!r} rope")
    _refuse_partial(values.get("partial_rotary_factor", config.get("partial_rotary_factor")))
    numbers = {key: values[key] for key in _KEYS[kind] if values.get(key) is not None}
    numbers["rope_theta"] = values.get("rope_theta") or config.get("rope_theta") or 10_000.0
    for key, value in numbers.items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not is_number or (value <= 0 and key not in {"mscale", "mscale_all_dim", "truncate"}):
            raise UnsupportedModel(f"config.json: {where}.{key} has no meaning: {value!r}")
    _fill_defaults(numbers, kind, where, config, max_position_embeddings)
    return Rope(rope_type=kind, **numbers)


def _refuse_partial(factor: float | None) -> None:
    if factor not in (None, 1, 1.0):
        raise UnsupportedModel(f"config.json: partial_rotary_factor {factor!r} is not supported")


def _fill_defaults(
    numbers: dict[str, Any],
    kind: str,
    where: str,
    config: Mapping[str, Any],
    max_position_embeddings: int,
) -> None:
    if kind in {"llama3", "yarn"}:
        # A value next to the rope parameters overrides the one among them, as in transformers.
        outer = config.get("original_max_position_embeddings")
        inner = numbers.get("original_max_position_embeddings", max_position_embeddings)
        numbers["original_max_position_embeddings"] = outer or inner
    if kind == "yarn":
        ratio = max_position_embeddings / numbers["original_max_position_embeddings"]
        numbers.setdefault("factor", ratio)
    required = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    for key in required.get(kind, []):
        if key not in numbers:
            raise UnsupportedModel(f"config.json: {where}.{key} is missing for {kind!r} rope")
