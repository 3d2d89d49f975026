"""The command that computes the memory of a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import sizing
from tools.sizing_models import MODELS


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["--"], "config.json: architectures = "),
        ({}, ["--", "--lora-targets", "q_prj"], "--lora-targets: the model has no target q_prj"),
        ({}, ["--device-memory", "1GiB", "--"], "memory"),
    ],
    ids=["model", "setting", "memory"],
)
def test_what_cannot_be_served_is_said_without_a_traceback(
    tmp_path: Path, config: dict[str, Any], arguments: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-0.6B"] | config))
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        sizing.main([*arguments, "--model", str(tmp_path)])
