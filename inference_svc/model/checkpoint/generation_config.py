"""Reads a model's generation_config.json: how it ends a text, and how its tokens are chosen by
default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference_svc.core import SamplingDefaults
from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import read_json

FILE_NAME = "generation_config.json"
GREEDY_BELOW = 0.01
"""Some models are saved with a temperature of nearly 0, which is greedy in effect."""


def read_generation_config(model_dir: Path) -> dict[str, Any]:
    """Returns the file's contents, nothing if there is none. Raises UnsupportedModel."""
    path = model_dir / FILE_NAME
    return read_json(path) if path.exists() else {}


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Returns the file's temperature, top_p and top_k (-1: off), as far as it has them. Their
    ranges are not checked. Raises UnsupportedModel naming the key that is no number."""
    config = read_generation_config(model_dir)
    found = {name: config.get(name) for name in ("temperature", "top_p", "top_k")}
    for name, value in found.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if value is not None and type(value) not in kinds:
            kind = "an integer" if name == "top_k" else "a number"
            raise UnsupportedModel(f"{model_dir / FILE_NAME}: {name} must be {kind}, not {value!r}")
    given = {name: value for name, value in found.items() if value is not None}
    if 0 < given.get("temperature", 0) < GREEDY_BELOW:
        given["temperature"] = 0.0
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return SamplingDefaults(**given)
