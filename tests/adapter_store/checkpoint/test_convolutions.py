"""Changes of a mixer's convolution, or of its own parameters, as PEFT saves them, are refused by
name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.errors import InvalidAdapter
from tests.support.models.zoo import AdapterSpec, adapted, make_model

NUM_CHANNELS = {"lfm2": 64, "qwen3_5": 80}
MODULES = {"lfm2": ("in_proj", "conv.conv"), "qwen3_5": ("in_proj_z", "linear_attn.conv1d")}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("config_key", ["target_modules", "modules_to_save"])
def test_convolutions_are_refused_by_name(kind: str, config_key: str, tmp_path: Path) -> None:
    plain, convolution = MODULES[kind]
    targets, options, rank = [plain], dict[str, Any](), 4
    if config_key == "modules_to_save":
        options = {config_key: [convolution]}
    else:
        targets, rank = [plain, convolution], NUM_CHANNELS[kind]  # PEFT wants a multiple of them
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LoRA adapter added to ConvNd layer with groups")
        spec = AdapterSpec("changed", rank, targets, options)
        adapted(make_model(kind, tmp_path / "model"), kind, tmp_path, [spec])
    with pytest.raises(InvalidAdapter) as error:
        open_checkpoint(tmp_path / "changed")
    assert error.value.reason == "SHAPE_INVALID"
    name = convolution.rpartition(".")[2]
    assert f"layers.0.{convolution}." in error.value.subject
    assert f"are not supported, train without {name} in {config_key}" in str(error.value)


def test_a_whole_mixer_is_refused_with_a_next_step(tmp_path: Path) -> None:
    for name, saved in (("whole", ["linear_attn"]), ("parts", ["in_proj_qkv", "out_proj"])):
        spec = AdapterSpec(name, 4, ["q_proj"], {"modules_to_save": saved})
        adapted(make_model("qwen3_5", tmp_path / f"{name} model"), "qwen3_5", tmp_path, [spec])
    with pytest.raises(InvalidAdapter) as error:
        open_checkpoint(tmp_path / "whole")
    assert error.value.reason == "TENSOR_UNKNOWN"
    assert error.value.subject.endswith("layers.0.linear_attn.A_log")
    assert str(error.value).endswith(
        "if modules_to_save has linear_attn, train its linear layers alone, by their names in "
        "target_modules or modules_to_save)"
    )
    assert open_checkpoint(tmp_path / "parts").rank == 4
