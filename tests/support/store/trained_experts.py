"""Experts of a mixture in the folders that `trainers/make.py` made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from contract.images.dtypes import DataType
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.images.targets import OtherName, Target, TargetKind

FOLDERS = Path(__file__).parents[2] / "adapter_store" / "checkpoint" / "trainers"
STACKED = ("experts_tinker", "experts_mlx")
SAME = ("experts_apart", *STACKED)
HIDDEN, INNER, EXPERTS, RANK, SCALE = 16, 12, 4, 2, 2.0
MODULE = "model.layers.0.mlp.experts"
PREFIX = f"base_model.model.{MODULE}"
SIZES = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
W1, W2, W3 = (f"{PREFIX}.{name}.lora_" for name in ("w1", "w2", "w3"))


def layout(
    names: Mapping[str, str] | None = None, num_experts: int = EXPERTS, **fields: Any
) -> Layout:
    """The experts of a layer as Qwen3 has them: gate and up are one parameter, too."""
    targets = []
    for part, (name, (num_in, num_out)) in enumerate(SIZES.items()):
        own = names[name] if names else f"{name}_proj"
        fused = OtherName(f"{MODULE}.gate_up_proj", outputs=(part * INNER, (part + 1) * INNER))
        shape = (TargetKind.EXPERTS, num_in, num_out, num_experts)
        other_names = () if name == "down" else (fused,)
        group = "down" if name == "down" else "gate_up"
        targets.append(
            Target(f"{MODULE}.{own}", 0, group, *shape, other_names=other_names, **fields)
        )
    made = Layout("org/tiny", "0" * 64, DataType.FLOAT32, 2, tuple(targets))
    validate(made)
    return made


def stacks(*shape_a: int, b: tuple[int, ...], key: str = W2) -> dict[str, torch.Tensor]:
    return {f"{key}A.weight": torch.ones(shape_a), f"{key}B.weight": torch.ones(b)}
