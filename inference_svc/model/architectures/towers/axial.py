"""The rotation by rows and columns of patches, as configs of towers describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference_svc.model.config.reader import MAX_HEADS, ConfigReader

_KINDS = (None, "axial", "default")
"""The names that releases of transformers have for it."""


def read_heads(config: ConfigReader, key: str, width: int) -> tuple[int, int]:
    """Returns the number of heads, which `key` has, and the elements of one, half of which turn by
    rows. Raises UnsupportedModel."""
    num_heads = config.within(key, 1, MAX_HEADS)
    head_dim = width // num_heads
    if width % num_heads or head_dim % 4:
        raise config.unsupported(key, f"{width} must be as many heads of a multiple of 4")
    return num_heads, head_dim


def read_theta(config: ConfigReader, rope: Any, default: float = 10_000.0) -> float:
    """Returns the base of the rotation's frequencies, as `rope` has it: the tower's
    `rope_parameters`, or the config itself; the `default` if it has none. Raises UnsupportedModel
    naming `rope_parameters` or `rope_theta`."""
    if not isinstance(rope, Mapping):
        raise config.unsupported("rope_parameters", "must be an object")
    if rope.get("rope_type", rope.get("type")) not in _KINDS:
        raise config.unsupported("rope_parameters", "rope_type must be axial or default")
    return ConfigReader(rope, {"rope_theta": default}, config.where).number("rope_theta")
