"""Reads values of config.json; every complaint names the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import Activation

MAX_LAYERS = 1024
"""More than any model has. A file may claim any number, and each layer is described before the
file's tensors are compared."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class ConfigReader:
    """The values of config.json, and, for keys that it leaves out, the values that transformers
    assumes: `defaults`. Every method raises UnsupportedModel for a value that has no meaning."""

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "config.json"
    ) -> None:
        self.given = values
        self.where = where
        self._values = {**defaults, **values}

    def with_values(self, **values: Any) -> ConfigReader:
        """Returns a reader for which config.json has these, too."""
        return ConfigReader({**self.given, **values}, self._values, self.where)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def positive(self, key: str) -> int:
        if self.count(key) == 0:
            raise self.unsupported(key, "must be positive")
        return int(self._values[key])

    def within(self, key: str, least: int, most: int) -> int:
        if not least <= self.count(key) <= most:
            raise self.unsupported(key, f"must be {least} to {most}")
        return int(self._values[key])

    def name_of(self, key: str, other: str) -> str:
        """Returns by which of two names config.json has a key; the first if by neither. Raises
        UnsupportedModel if it has both and they differ."""
        if self.given.get(other) is None:
            return key
        if self.given.get(key) not in (None, self.given[other]):
            raise self.unsupported(other, f"must be {key}, {self.given[key]!r}")
        return other

    def count(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or value < 0:
            raise self.unsupported(key, "must be an integer, not negative")
        return value

    def flag(self, key: str) -> bool:
        """Returns the value of a key that may be left out: then it is False."""
        value = self.get(key)
        if value not in (None, False, True):
            raise self.unsupported(key, "must be true or false")
        return bool(value)

    def number(self, key: str) -> float:
        """Returns a finite number above 0."""
        value = self.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.unsupported(key, "must be a number above 0")
        return float(value)

    def optional(self, key: str) -> float | None:
        """Returns a number above 0, or None where the key is null or left out."""
        return None if self.get(key) is None else self.number(key)

    def epsilon(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.unsupported(key, "must be a small number")
        return float(value)

    def activation(self, key: str = "hidden_act", also: tuple[Activation, ...] = ()) -> Activation:
        """Returns an activation that every family may have, or one of `also`."""
        names = {each.value: each for each in (*COMMON, *also)}
        value = self.get(key)
        if not isinstance(value, str) or value not in names:
            raise self.unsupported(key, f"supported are {', '.join(names)}")
        return names[value]

    @property
    def num_layers(self) -> int:
        return self.within("num_hidden_layers", 1, MAX_LAYERS)

    @property
    def head_dim(self) -> int:
        """Returns `head_dim`, or its value by the hidden size; it is even."""
        if self.get("head_dim") is None:
            hidden_size, num_heads = self.positive("hidden_size"), self.positive(HEADS)
            if hidden_size % num_heads:
                raise self.unsupported("hidden_size", f"not a multiple of {num_heads} heads")
            head_dim = hidden_size // num_heads
        else:
            head_dim = self.positive("head_dim")
        if head_dim % 2:
            raise self.unsupported("head_dim", "rotary embedding needs an even size", head_dim)
        return head_dim

    @property
    def num_kv_heads(self) -> int:
        """Returns the key heads, as many as there are heads if none are named."""
        num_heads = self.positive(HEADS)
        if self.get(KV_HEADS) is None:
            return num_heads
        num_kv_heads = self.positive(KV_HEADS)
        if num_heads % num_kv_heads:
            raise self.unsupported(KV_HEADS, f"does not divide num_attention_heads {num_heads}")
        return num_kv_heads

    def layer_types(
        self, default: Callable[[int], str], kinds: tuple[str, ...] = (FULL, SLIDING)
    ) -> tuple[str, ...]:
        """Returns the kind of attention of each layer, one of these: its entry of `layer_types`, or
        the default for its index."""
        types = self.get("layer_types")
        if types is None:
            return tuple(default(layer) for layer in range(self.num_layers))
        if not isinstance(types, list) or len(types) != self.num_layers:
            raise self.unsupported("layer_types", f"must name {self.num_layers} layers")
        for each in types:
            if each not in kinds:
                reason = f"supported here are {', '.join(kinds)}"
                raise self.unsupported("layer_types", reason, each)
        return tuple(types)

    def require_attention(self, layer_types: tuple[str, ...]) -> None:
        """Raises UnsupportedModel if no layer has keys and values."""
        if FULL not in layer_types:
            raise self.unsupported("layer_types", f"one layer at least must have {FULL}")

    @property
    def window(self) -> int | None:
        """Returns `sliding_window`, None where it is null."""
        return None if self.get("sliding_window") is None else self.positive("sliding_window")

    def require_same(self, key: str, other: str) -> None:
        """Raises UnsupportedModel unless a key is left out, or has the value of another."""
        if self.get(key) is not None and self.get(key) != self.get(other):
            raise self.unsupported(key, f"must be {other}, {self.get(other)!r}")

    def same_window(self, window: int | None) -> tuple[int | None, ...]:
        """Returns the window of every layer, which all have the same: `layer_types` may not say
        otherwise."""
        kind = FULL if window is None else SLIDING
        if any(each != kind for each in self.layer_types(lambda layer: kind)):
            raise self.unsupported("layer_types", f"all layers have {kind}")
        return (window,) * self.num_layers

    def windows(self, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
        """Returns how many positions a query of each layer attends to; None: all."""
        if SLIDING in layer_types and self.get("sliding_window") is None:
            raise self.unsupported("layer_types", "sliding_window is not set")
        return tuple(
            self.positive("sliding_window") if each == SLIDING else None for each in layer_types
        )

    def unsupported(self, key: str, reason: str, value: Any = None) -> UnsupportedModel:
        value = self.get(key) if value is None else value
        return UnsupportedModel(f"{self.where}: {key} = {value!r}: {reason}")


def every_full(count: int) -> Callable[[int], str]:
    """Returns the kind of attention by layer where each layer of this number has full attention,
    and the others before it a window."""
    return lambda layer: SLIDING if (layer + 1) % count else FULL


COMMON = (Activation.SILU, Activation.GELU_TANH)
HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"
MAX_HEADS = 1024
"""More heads than any model has: descriptions list them before a tensor is compared."""
