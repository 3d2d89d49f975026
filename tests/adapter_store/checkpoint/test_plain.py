"""A plain LoRA computes what PEFT computes with the adapter, or the adapter is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from adapter_store.checkpoint.conversion.plain import PlainLora
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.errors import CorruptData, IncompatibleAdapter
from tests.support.store.adapters import random_tensors, save_adapter
from tests.support.store.peft_models import adapt, make_model, moe

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
IDS = torch.arange(12)[None]


def write(source: Path, target: Path) -> PlainLora:
    plain = PlainLora(open_checkpoint(source), "org/base")
    target.mkdir()
    for piece in plain.pieces():
        with (target / piece.file).open("ab") as file:
            file.write(piece.data)
    assert {path.name: path.stat().st_size for path in target.iterdir()} == plain.sizes
    return plain


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        {
            "target_modules": ["q_proj", "k_proj", "gate_proj"],
            "rank_pattern": {"k_proj": 5, "gate_proj": 1},
            "alpha_pattern": {"q_proj": 3},
        },
        {
            "target_modules": ["q_proj", "up_proj"],
            "layers_to_transform": [0],
            "layers_pattern": "layers",
        },
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "save_embedding_layers": False},
    ],
    ids=["lora", "rslora", "patterns", "layers", "embedding and head"],
)
def test_peft_computes_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    adapted = adapt(tmp_path / "source", **options)
    plain = write(tmp_path / "source", tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / CONFIG).read_text())
    assert config["r"] == config["lora_alpha"] == plain.rank
    assert not config.keys() & {"use_rslora", "rank_pattern", "alpha_pattern"}
    tensors = load_file(tmp_path / "plain" / WEIGHTS)
    ranks = {each.shape[0 if "_A" in name else 1] for name, each in tensors.items()}
    assert ranks == {plain.rank}
    model = peft.PeftModel.from_pretrained(make_model(), tmp_path / "plain").eval()
    torch.testing.assert_close(logits(model), logits(adapted), rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits(model), logits(make_model()))


def test_a_scale_of_1_leaves_the_bytes_as_they_are(tmp_path: Path) -> None:
    source = save_adapter(tmp_path / "a", rank=8, dtype=torch.bfloat16)  # alpha is 8, too
    write(source, tmp_path / "plain")
    made, saved = load_file(tmp_path / "plain" / WEIGHTS), load_file(source / WEIGHTS)
    assert made.keys() == saved.keys()
    assert all(torch.equal(made[key], saved[key]) for key in saved)
    scaled = save_adapter(tmp_path / "b", rank=4, dtype=torch.bfloat16)
    write(scaled, tmp_path / "folded")
    types = {each.dtype for each in load_file(tmp_path / "folded" / WEIGHTS).values()}
    assert types == {torch.bfloat16, torch.float32}  # the fold is rounded once, by the engine


def test_an_adapter_of_mlx_is_turned(tmp_path: Path) -> None:
    source = Path(__file__).parent / "trainers" / "mlx"
    scale = json.loads((source / CONFIG).read_text())["lora_parameters"]["scale"]
    write(source, tmp_path / "plain")
    made, saved = (
        load_file(tmp_path / "plain" / WEIGHTS),
        load_file(source / "adapters.safetensors"),
    )
    assert len(made) == len(saved)
    for name in {key.rpartition(".")[0] for key in saved}:
        a, b = (made[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
        delta = scale * (saved[f"{name}.lora_a"].float() @ saved[f"{name}.lora_b"].float())
        torch.testing.assert_close(b @ a, delta.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "feature", "word"),
    [
        ({"use_dora": True}, "dora", "DoRA"),
        ({"lora_bias": True}, "lora_bias", "lora_bias"),
        ({"bias": "all"}, "biases", "biases of the base"),
        ({"modules_to_save": ["norm"]}, "norms", "norms of the base"),
        ({"modules_to_save": ["lm_head"]}, "whole_weights", "modules_to_save"),
        ({"trainable_token_indices": [3, 7]}, "token_rows", "trainable_token_indices"),
        ({"alora_invocation_tokens": [3, 4]}, "alora", "aLoRA"),
        ({"target_modules": ["embed_tokens"]}, "saved_along", "loadout strip"),
    ],
)
def test_anything_else_is_refused_by_name(
    options: dict[str, Any], feature: str, word: str, tmp_path: Path
) -> None:
    adapt(tmp_path / "source", **options)
    with pytest.raises(IncompatibleAdapter, match=word) as refused:
        PlainLora(open_checkpoint(tmp_path / "source"), "org/base")
    assert (refused.value.reason, refused.value.subject) == ("NOT_PLAIN_LORA", feature)


def test_experts_in_one_tensor_and_other_towers_are_refused(tmp_path: Path) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapt(tmp_path / "moe", moe("qwen3"), target_modules=[], target_parameters=parameters)
    with pytest.raises(IncompatibleAdapter, match="target_parameters"):
        PlainLora(open_checkpoint(tmp_path / "moe"), "org/base")
    tensors = {
        name.replace("model.layers", "model.visual.blocks"): each
        for name, each in random_tensors({"model.layers.0.self_attn.q_proj": 4}).items()
    }
    tower = save_adapter(tmp_path / "tower", tensors=tensors, target_modules=["q_proj"])
    with pytest.raises(IncompatibleAdapter, match="modules of visual"):
        PlainLora(open_checkpoint(tower), "org/base")


def test_bytes_that_changed_on_disk_end_before_the_last_piece(tmp_path: Path) -> None:
    source = save_adapter(tmp_path / "a")
    digest = open_checkpoint(source).digest
    data = bytearray((source / WEIGHTS).read_bytes())
    data[-9] ^= 1
    (source / WEIGHTS).write_bytes(data)
    plain = PlainLora(open_checkpoint(source, digest=digest), "org/base")
    received = []
    with pytest.raises(CorruptData):
        received.extend(plain.pieces())
    assert sum(len(piece.data) for piece in received) < sum(plain.sizes.values())
