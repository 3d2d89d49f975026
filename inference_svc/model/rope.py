"""Rotary position embedding: the parameters in config.json, and their frequencies.

The formulas are from transformers' `modeling_rope_utils`; only kinds whose frequencies do not
depend on the sequence's length so far are supported. `dynamic` is HunYuan's, whose fixed `alpha`
stretches the base (transformers' `ntk_alpha`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

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
    "longrope": frozenset(
        {
            "factor",
            "attention_factor",
            "original_max_position_embeddings",
            "long_factor",
            "short_factor",
        }
    ),
    "dynamic": frozenset({"factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
    "proportional": frozenset({"factor"}),
}
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
    "dynamic": ("alpha",),
}
_MAY_BE_ZERO = frozenset({"mscale", "mscale_all_dim", "truncate"})
_LISTS = frozenset({"long_factor", "short_factor"})


class Axes(NamedTuple):
    """Which of several positions of a token turns each pair of a head: `sections` are the numbers
    of pairs of each axis. They lie one behind the other; or, if they are `interleaved`, each next
    pair is of the next axis, and the pairs that other axes leave are of the first one. Each section
    `restarts` with the frequencies of a head of its own size, or goes on with the whole head's; or
    the whole head's are for one axis after the other, if it `takes_turns`."""

    sections: tuple[int, ...]
    interleaved: bool = False
    restarts: bool = False
    takes_turns: bool = False

    @property
    def of_pairs(self) -> Tensor:
        """The axis of each pair, int64 [pairs]."""
        if not self.interleaved:
            counts = torch.tensor(self.sections)
            return torch.arange(len(counts)).repeat_interleave(counts)
        axes = torch.arange(sum(self.sections))
        own, turn = axes % len(self.sections), axes // len(self.sections)
        return torch.where(turn < torch.tensor(self.sections)[own], own, 0)


@dataclass(frozen=True, slots=True)
class Rope:
    """One kind of rotary embedding; fields of other kinds keep their defaults.

    `part` of each head is turned, from its beginning. Element i turns with element i + half of
    that, or, if it `is_interleaved`, with its neighbour.
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    part: float = 1.0
    is_interleaved: bool = False
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
    alpha: float = 1.0
    long_factor: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    is_long: bool = False
    """Whether longrope takes its long factors."""
    axes: Axes | None = None
    """The axes of tokens that have several positions; None: they have one."""

    def rotary_size(self, head_dim: int) -> int:
        """Returns how many elements of a head are turned."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.part)

    def for_length(self, max_model_len: int) -> Rope:
        """Returns the rotation for sequences up to this length."""
        if self.rope_type != "longrope":
            return self
        return replace(self, is_long=max_model_len > self.original_max_position_embeddings)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Returns fp32 [rotary size / 2], on the CPU; position p turns pair i by p * result[i]."""
        if self.axes is not None and self.axes.restarts:
            one = replace(self, axes=None)
            return torch.cat([one.inverse_frequencies(2 * n) for n in self.axes.sections])
        if self.axes is not None and self.axes.takes_turns:
            whole, count = replace(self, axes=None).inverse_frequencies(head_dim), len(self.axes[0])
            return torch.cat([whole[axis::count] for axis in range(count)])
        if self.rope_type == "proportional":
            return self._proportional(head_dim)
        head_dim = self.rotary_size(head_dim)
        steps = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        if self.rope_type == "dynamic":
            return 1.0 / ((self.rope_theta * self.alpha ** (head_dim / (head_dim - 2))) ** steps)
        plain = 1.0 / (self.rope_theta**steps)
        if self.rope_type == "longrope":
            factors = self.long_factor if self.is_long else self.short_factor
            return 1.0 / (torch.tensor(factors) * self.rope_theta**steps)
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
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            context = self.original_max_position_embeddings
            ratio = math.log(self.factor) / math.log(context) if self.factor > 1 else 0.0
            return math.sqrt(1 + ratio)
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

    def _proportional(self, head_dim: int) -> Tensor:
        """Frequencies of the whole head, of which only a part turns."""
        num_turning = int(self.part * head_dim // 2)
        steps = torch.arange(0, 2 * num_turning, 2, dtype=torch.float) / head_dim
        still = torch.zeros(head_dim // 2 - num_turning)
        return torch.cat((1.0 / self.rope_theta**steps, still)) / self.factor

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


class RopeFacts(NamedTuple):
    """A family's facts about its rotation beside the parameters in config.json.

    `part`: of a head that is turned if config.json does not say; None: all of it, always. `kinds`
    has further values of `rope_type`, and their names here; `other_keys` are parameters that are
    not the rotation's.
    """

    max_position_embeddings: int
    theta: float = 10_000.0
    part: float | None = None
    is_interleaved: bool = False
    kinds: Mapping[str, str] = MappingProxyType({})
    other_keys: Collection[str] = ()


COMMON_KINDS = ("default", "linear", "llama3", "yarn")


def parse_rope(config: Mapping[str, Any], facts: RopeFacts) -> Rope:
    """Reads `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

    Raises UnsupportedModel naming a kind, a key or a value that is not computed here.
    """
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return parse_parameters(config.get(where) or {}, where, config, facts)


def parse_parameters(values: Any, where: str, config: Mapping[str, Any], facts: RopeFacts) -> Rope:
    """Reads `values`, the parameters of one rotation, and the keys beside them in `config`. Raises
    as `parse_rope`."""
    if not isinstance(values, Mapping):
        raise UnsupportedModel(f"config.json: {where} is not an object: {values!r}")
    name = values.get("rope_type") or values.get("type") or "default"
    kinds = {**{each: each for each in COMMON_KINDS}, **facts.kinds}
    if not isinstance(name, str) or name not in kinds:
        raise UnsupportedModel(
            f"config.json: {where}.rope_type {name!r} is not supported; "
            f"supported are {', '.join(kinds)}"
        )
    kind = kinds[name]
    for key, value in values.items():
        if value is not None and key not in _KEYS[kind] | _COMMON_KEYS | {*facts.other_keys}:
            raise UnsupportedModel(f"config.json: {where}.{key} is not supported for {name!r} rope")
    numbers = {key: values[key] for key in _KEYS[kind] if values.get(key) is not None}
    numbers["rope_theta"] = values.get("rope_theta") or config.get("rope_theta") or facts.theta
    numbers["part"] = _part(values.get("partial_rotary_factor"), config, facts)
    _fill_defaults(numbers, kind, where, config, facts.max_position_embeddings)
    for key, value in numbers.items():
        _check(f"{where}.{key}", key, value)
    lists = {key: tuple(numbers[key]) for key in _LISTS & numbers.keys()}
    return Rope(kind, is_interleaved=facts.is_interleaved, **(numbers | lists))


def _part(value: Any, config: Mapping[str, Any], facts: RopeFacts) -> Any:
    value = config.get("partial_rotary_factor") if value is None else value
    if value is None:
        return 1.0 if facts.part is None else facts.part
    if facts.part is None and value != 1:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {value!r} is not supported")
    return value


def _check(field: str, key: str, value: Any) -> None:
    """Raises UnsupportedModel for a value that is no number, or no list of numbers where one is
    due."""
    numbers = value if key in _LISTS else [value]
    are_numbers = isinstance(numbers, list) and all(
        isinstance(each, int | float) and math.isfinite(each) for each in numbers
    )
    if not are_numbers or (key not in _MAY_BE_ZERO and any(each <= 0 for each in numbers)):
        raise UnsupportedModel(f"config.json: {field} has no meaning: {value!r}")
    if key == "part" and value > 1:
        raise UnsupportedModel(f"config.json: {field} has no meaning: {value!r}")


def _fill_defaults(
    numbers: dict[str, Any],
    kind: str,
    where: str,
    config: Mapping[str, Any],
    max_position_embeddings: int,
) -> None:
    if kind in {"llama3", "yarn", "longrope"}:
        # A value next to the rope parameters overrides the one among them, as in transformers.
        outer = config.get("original_max_position_embeddings")
        inner = numbers.get("original_max_position_embeddings", max_position_embeddings)
        numbers["original_max_position_embeddings"] = outer or inner
    if kind in {"yarn", "longrope"} and "factor" not in numbers:
        original = numbers["original_max_position_embeddings"]
        _check(f"{where}.original_max_position_embeddings", "", original)
        numbers["factor"] = max_position_embeddings / original
    for key in _REQUIRED.get(kind, ()):
        if key not in numbers:
            raise UnsupportedModel(f"config.json: {where}.{key} is missing for {kind!r} rope")
