"""Makes adapters and layouts for the store's benchmarks, with real shapes and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.models import NAME
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

Shapes = dict[str, tuple[int, int]]
"""(in features, out features) of each target of a layer."""

HIDDEN, MLP, KV, LAYERS = 1024, 2816, 256, 16
BENCH_200M: Shapes = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}
LLAMA_8B: Shapes = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}


def make_layout(shapes: Shapes, layers: int, base_model: str = NAME) -> pb.ModelLayout:
    """Returns a layout in bf16."""
    return pb.ModelLayout(
        base_model=base_model,
        config_sha256="0" * 64,
        dtype=pb.DATA_TYPE_BFLOAT16,
        image_formats=[1],
        targets=[
            pb.Target(
                name=f"model.layers.{layer}.{path}",
                layer=layer,
                group=f"layers.{layer}.{path}",
                kind=pb.TARGET_KIND_LINEAR,
                in_features=num_in,
                out_features=num_out,
            )
            for layer in range(layers)
            for path, (num_in, num_out) in shapes.items()
        ],
    )


def make_adapter(
    folder: Path,
    shapes: Shapes,
    layers: int,
    *,
    rank: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    base_model: str = NAME,
) -> int:
    """Makes a PEFT folder over all targets, with alpha 2 * rank, and returns the bytes of its
    weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for path, (num_in, num_out) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{path}.lora_{{}}.weight"
            for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                values = torch.randn(shape, generator=generator) * 0.02
                tensors[name.format(part)] = values.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [path.rpartition(".")[2] for path in shapes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return (folder / "adapter_model.safetensors").stat().st_size
