"""What a model's generation_config.json says of how tokens are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference_svc.app import sampling_defaults
from inference_svc.config import InferenceSettings
from inference_svc.core import NO_DEFAULTS, SamplingDefaults
from inference_svc.errors import UnsupportedModel

VOCAB = 100


def read(folder: Path, text: str | None, source: str = "model") -> SamplingDefaults:
    (folder / "config.json").write_text("{}")
    if text is not None:
        (folder / "generation_config.json").write_text(text)
    config = InferenceSettings(model=folder, generation_defaults=source)  # type: ignore[arg-type]
    return sampling_defaults(config, VOCAB)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(0.6, 20, 0.95)),
        ({"temperature": 0, "do_sample": False}, SamplingDefaults(temperature=0)),
        ({"temperature": 1e-6}, SamplingDefaults(temperature=0)),
        ({"top_k": -1, "top_p": None}, NO_DEFAULTS),
        ({"eos_token_id": 2}, NO_DEFAULTS),
    ],
)
def test_what_the_file_has_is_taken(
    tmp_path: Path, content: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert read(tmp_path, json.dumps(content)) == expected
    assert read(tmp_path, json.dumps(content), "none") == NO_DEFAULTS


def test_no_file_no_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, None) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "generation_config.json cannot be read: "),
        ("[]", "generation_config.json does not hold a JSON object"),
        ('{"temperature": "warm"}', "generation_config.json: temperature must be a number, not 'w"),
        ('{"temperature": true}', "generation_config.json: temperature must be a number, not True"),
        ('{"temperature": NaN}', "generation_config.json: temperature must be 0, or from 0.01"),
        ('{"temperature": -1}', "generation_config.json: temperature must be 0, or from 0.01"),
        ('{"top_k": 2.5}', "generation_config.json: top_k must be an integer, not 2.5"),
        ('{"top_k": -2}', "generation_config.json: top_k must be at least 0"),
        ('{"top_p": 0}', "generation_config.json: top_p must be above 0 and at most 1, not 0"),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/{why}")
    assert str(caught.value).endswith("; --generation-defaults none does without")
    assert read(tmp_path, text, "none") == NO_DEFAULTS
