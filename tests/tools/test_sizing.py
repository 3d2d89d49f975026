"""The command that computes the memory of a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference_svc.config import InferenceSettings
from tests.support.pictures.models import save_config
from tools import sizing
from tools.sizing_models import LLAMA_8B, MODELS, QWEN3_5_08B


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


def test_stages_have_the_model_together(tmp_path: Path) -> None:
    """Each holds a part of all adapters, and of the keys and values of all tokens."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    given = {"model": tmp_path, "device": "cpu", "kv_memory": "1GiB", "adapter_memory": "1GiB"}
    whole = sizing.plan(InferenceSettings.model_validate(given))
    given |= {"pipeline_parallel": 2, "tensor_parallel": 2}
    staged = sizing.plan(InferenceSettings.model_validate(given))
    assert staged.bytes_of("weights") == pytest.approx(whole.bytes_of("weights"), rel=0.01)
    assert staged.bytes_of("arena") == 4 * whole.bytes_of("arena")
    assert staged.kv_tokens == 4 * whole.kv_tokens
    held = [each.num_adapters("arena", sizing.Adapters()) for each in (whole, staged)]
    # A half of the layers; of these a half, and what two ranks both have.
    assert 2 * held[0] < held[1] < 4 * held[0]


def test_the_tower_of_a_model_that_reads_images_is_counted(tmp_path: Path) -> None:
    """Once, whatever the number of processes."""
    given = {"model": save_config("Qwen3VL", tmp_path / "model"), "device": "cpu"}
    given |= {"kv_memory": "1MiB", "adapter_memory": "1MiB", "max_model_len": 256}

    def weights_bytes(**more: int) -> int:
        return sizing.plan(InferenceSettings.model_validate(given | more)).bytes_of("weights")

    tower = weights_bytes() - weights_bytes(max_prompt_images=0)
    shape = {"tensor_parallel": 2}
    assert weights_bytes(**shape) - weights_bytes(**shape, max_prompt_images=0) == tower > 0


def test_states_of_recurrent_layers_are_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5_08B))
    sizing.main(["--", "--model", str(tmp_path), "--max-sequences", "4", "--stored-states", "10"])
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "recurrent" in each)
    # 20 slots: two for each sequence, the stored ones, and two that no sequence owns.
    words = "385.3 MiB: 19.3 MiB each, two for each of 4 requests, 10 stored, one every 512 tokens"
    assert line.endswith(words)
