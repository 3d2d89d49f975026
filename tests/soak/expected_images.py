"""Adapters for the soak, and what their images have to be, byte for byte, by another way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

BASE_MODEL = "org/soak"
HIDDEN = 64
RANKS = (1, 4, 16, 96, 512)
MODULES = ("q_proj", "v_proj")
NUM_LAYERS = 3
SCALE = 2.0  # alpha = 2 * rank: folding it in is exact

TARGETS = tuple(
    f"model.layers.{layer}.self_attn.{module}" for layer in range(NUM_LAYERS) for module in MODULES
)


@dataclass(frozen=True)
class Content:
    """One adapter as a folder."""

    folder: Path
    rank: int
    tensors: dict[str, tuple[np.ndarray, np.ndarray]]
    digest: str

    @cached_property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}

    def image(self, header: pb.ImageHeader) -> bytes:
        """The image that the header describes: A as saved, B transposed with the scale in it."""
        image = bytearray(header.total_bytes)
        sides = set()
        for segment in header.segments:
            name = TARGETS[segment.target]
            a, b = self.tensors[name]
            is_a = segment.kind == pb.SEGMENT_KIND_A
            data = a.tobytes() if is_a else (b.T * np.float32(SCALE)).tobytes()
            assert segment.rank == self.rank
            assert segment.length_bytes == len(data), f"{name}: {segment}"
            image[segment.offset : segment.offset + len(data)] = data
            sides.add((name, is_a))
        assert len(sides) == len(header.segments) == 2 * len(self.tensors)
        return bytes(image)


def make_contents(folder: Path, number: int) -> list[Content]:
    """`number` different adapters under `folder`, of 5 KB to 2 MB."""
    return [_make(folder / f"adapter-{index}", index) for index in range(number)]


def _make(folder: Path, index: int) -> Content:
    folder.mkdir(parents=True)
    rank = RANKS[index % len(RANKS)]
    random = np.random.default_rng(index)
    pairs = {
        name: (
            random.standard_normal((rank, HIDDEN), dtype=np.float32),
            random.standard_normal((HIDDEN, rank), dtype=np.float32),
        )
        for name in TARGETS[: 2 + index % (len(TARGETS) - 1)]
    }
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": BASE_MODEL,
        "r": rank,
        "lora_alpha": SCALE * rank,
        "target_modules": sorted(pairs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    digest = open_checkpoint(folder, CheckpointLimits()).digest
    return Content(folder, rank, pairs, digest)


def layout_message() -> pb.ModelLayout:
    """The layout of the base model that the adapters are for."""
    targets = [
        pb.Target(
            name=name,
            layer=index // len(MODULES),
            group=name.rpartition(".")[0],
            kind=pb.TARGET_KIND_LINEAR,
            in_features=HIDDEN,
            out_features=HIDDEN,
        )
        for index, name in enumerate(TARGETS)
    ]
    return pb.ModelLayout(
        base_model=BASE_MODEL,
        config_sha256="0" * 64,
        dtype=pb.DATA_TYPE_FLOAT32,
        image_formats=[1],
        targets=targets,
    )
