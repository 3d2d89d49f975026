"""The model that a config means, by its own name, a path, or the name of a quantized copy."""

from __future__ import annotations

import pytest

from contract.base_model_names import find_named, hub_name, may_mean


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/cache/models--org--llama/snapshots/0a", "org/llama"),
        ("/cache/models--gpt2/snapshots/0a", "gpt2"),
        ("/cache/llama", ""),
    ],
)
def test_names_of_cached_models(path: str, name: str) -> None:
    assert hub_name(path) == name


@pytest.mark.parametrize(
    ("in_config", "may"),
    [
        ("", True),
        ("org/Llama", True),
        ("copy/llama", True),
        ("copy/llama-bnb-4bit", True),
        ("/runs/llama", True),
        ("/cache/models--org--llama/snapshots/0a", True),
        ("org/other", False),
        ("/runs/other", False),
    ],
)
def test_a_config_may_mean_a_model(in_config: str, may: bool) -> None:
    assert may_mean(in_config, ["org/llama"]) == may
    assert bool(find_named(in_config, {"served": ["org/llama"]})) == (may and in_config != "")
