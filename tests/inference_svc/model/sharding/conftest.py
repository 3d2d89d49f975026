"""Models whose sizes several ranks divide."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.families import MODELS

DIVISIBLE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
}
"""Sizes that four ranks divide, in the place of a family's."""


@pytest.fixture(scope="module")
def folder_of(random_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder_of(name)`: a model of `MODELS` whose sizes four ranks divide."""

    @lru_cache(maxsize=4)
    def make(name: str) -> Path:
        family, changes = MODELS[name]
        model = random_model(family, **(changes | divisible(family, changes)))
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        return folder

    return make


def divisible(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    found = {key: DIVISIBLE[key] for key in ("num_attention_heads", "num_key_value_heads")}
    found |= {key: DIVISIBLE[key] for key in DIVISIBLE.keys() & changes.keys()}
    if changes.get("num_key_value_heads") == 1:
        found["num_key_value_heads"] = 1
    return found | ({"hidden_size": 64} if family == "Phi3" else {})
