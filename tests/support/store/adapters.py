"""A tiny base model's layout, and PEFT adapters for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.targets import Target, TargetKind

BASE_MODEL = "org/tiny"
HIDDEN, KV, MLP, VOCAB, LAYERS = 16, 8, 24, 32, 2

# Last component of a module: (path in its layer, group, in, out)
MODULES = {
    "q_proj": ("self_attn.q_proj", "qkv", HIDDEN, HIDDEN),
    "k_proj": ("self_attn.k_proj", "qkv", HIDDEN, KV),
    "v_proj": ("self_attn.v_proj", "qkv", HIDDEN, KV),
    "o_proj": ("self_attn.o_proj", "o", HIDDEN, HIDDEN),
    "gate_proj": ("mlp.gate_proj", "gate_up", HIDDEN, MLP),
    "up_proj": ("mlp.up_proj", "gate_up", HIDDEN, MLP),
    "down_proj": ("mlp.down_proj", "down", MLP, HIDDEN),
}

MakeAdapter = Callable[..., Path]
MakeLayout = Callable[..., Layout]


def all_targets() -> tuple[Target, ...]:
    embedding = Target("model.embed_tokens", None, "embed", TargetKind.EMBEDDING, VOCAB, HIDDEN)
    head = Target("lm_head", None, "head", TargetKind.LINEAR, HIDDEN, VOCAB)
    layers = [
        Target(
            f"model.layers.{layer}.{path}",
            layer,
            f"layers.{layer}.{group}",
            TargetKind.LINEAR,
            in_features,
            out_features,
        )
        for layer in range(LAYERS)
        for path, group, in_features, out_features in MODULES.values()
    ]
    return (embedding, *layers, head)


def random_tensors(
    names: Mapping[str, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A and B, as PEFT names and shapes them, for {target name: rank}."""
    generator = torch.Generator().manual_seed(seed)
    by_name = {target.name: target for target in all_targets()}
    tensors = {}
    for name, rank in names.items():
        target = by_name[name]
        a = torch.randn(rank, target.in_features, generator=generator).to(dtype)
        b = torch.randn(target.out_features, rank, generator=generator).to(dtype)
        kind = "embedding_" if target.kind is TargetKind.EMBEDDING else ""
        end = "" if kind else ".weight"
        tensors[f"base_model.model.{name}.lora_{kind}A{end}"] = a
        tensors[f"base_model.model.{name}.lora_{kind}B{end}"] = b
    return tensors


def save_adapter(
    path: Path,
    modules: tuple[str, ...] = ("q_proj", "v_proj"),
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Makes the folder `path` as PEFT saves an adapter. `tensors` replaces the random ones; a
    config value of `...` drops the key."""
    path.mkdir()
    if tensors is None:
        names = [t.name for t in all_targets() if t.name.rpartition(".")[2] in modules]
        tensors = random_tensors(dict.fromkeys(names, rank), dtype, seed)
    save_file(dict(tensors), path / "adapter_model.safetensors", metadata={"format": "pt"})
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": BASE_MODEL,
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(modules),
        **config,
    }
    fields = {key: value for key, value in fields.items() if value is not ...}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def tiny_layout(
    dtype: DataType = DataType.FLOAT32,
    targets: tuple[Target, ...] | None = None,
    base_model: str = BASE_MODEL,
) -> Layout:
    """By default of all of the tiny model's targets."""
    return Layout(
        base_model=base_model,
        config_sha256="0" * 64,
        dtype=dtype,
        image_format=1,
        targets=all_targets() if targets is None else targets,
    )


def make_large(
    client,
    make_adapter,
    make_layout,
    name: str = "large",
    value: float = 1.0,
    features: int = 1 << 20,
):
    """An image of some 34 MB: more than a stream's windows and buffers hold; less of fewer
    features."""
    target = Target("model.layers.0.q", 0, "g", TargetKind.LINEAR, features, 16)
    key = "base_model.model.model.layers.0.q.lora_{}.weight"
    tensors = {
        key.format("A"): torch.full((8, features), value),
        key.format("B"): torch.ones(16, 8),
    }
    folder = make_adapter(("q",), rank=8, tensors=tensors, folder=name)
    layout_id = client.register_layout(make_layout(targets=(target,)))
    return client.register(name, folder).adapter.digest, layout_id
