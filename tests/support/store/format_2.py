"""A layout and checkpoints with every kind of segment of image format 2."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint
from adapter_store.checkpoint.peft.config import parse_config
from adapter_store.checkpoint.reading.files import AdapterFile, CheckpointLimits
from adapter_store.checkpoint.reading.safetensors import TensorRecord, read_header
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.checkpoint.weights import ExpertWeights, Replacement
from adapter_store.images.compile import Image
from contract.images.dtypes import DataType
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Held, OtherName, Target, TargetKind

HIDDEN, INNER, VOCAB, EXPERTS = 32, 48, 600, 4
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
QKV = "model.layers.0.self_attn.qkv_proj"
SIZES = {Q: 32, K: 16, V: 16}
GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
GATE_UP = "model.layers.0.mlp.gate_up_proj"
W1 = "model.layers.0.mlp.experts.w1"
NORM = "model.layers.0.input_layernorm"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
SCALE = 0.5
HASH_ROWS = 256


def linear(name: str, size_in: int, size_out: int, **fields: Any) -> Target:
    group = fields.pop("group", name)
    return Target(
        name, fields.pop("layer", 0), group, TargetKind.LINEAR, size_in, size_out, **fields
    )


def part_of_qkv(name: str) -> OtherName:
    order = [Q, K, V]
    start = sum(SIZES[each] for each in order[: order.index(name)])
    return OtherName(QKV, outputs=(start, start + SIZES[name]))


def layout_of(**changes: Any) -> Layout:
    """A layer with attention, a feed-forward half that is fused in turns, and experts."""
    turns = [OtherName(GATE_UP, block_sizes=(1, 1), block_part=part) for part in (0, 1)]
    targets = (
        Target(EMBEDDING, None, "embed", TargetKind.EMBEDDING, VOCAB, HIDDEN, space="text"),
        Target(NORM, 0, "norm", TargetKind.VECTOR, 0, HIDDEN),
        *(
            linear(name, HIDDEN, SIZES[name], group="qkv", other_names=(part_of_qkv(name),))
            for name in (Q, K, V)
        ),
        linear(GATE, HIDDEN, INNER, group="gate_up", other_names=(turns[0],)),
        linear(UP, HIDDEN, INNER, group="gate_up", other_names=(turns[1],)),
        Target(
            *(W1, 0, "w1", TargetKind.EXPERTS, HIDDEN, INNER, EXPERTS),
            other_names=(TURNED,),
        ),
        linear("vision.proj", 8, 8, layer=1, held=Held.UNUSED, space="vision"),
        linear(HEAD, HIDDEN, VOCAB, layer=None),
    )
    made = Layout("org/base", "0" * 64, DataType.FLOAT32, 2, targets)
    made = dataclasses.replace(made, **changes)
    validate(made)
    return made


def change(layout: Layout, name: str, **fields: Any) -> Layout:
    targets = tuple(
        dataclasses.replace(target, **fields) if target.name == name else target
        for target in layout.targets
    )
    changed = dataclasses.replace(layout, targets=targets)
    validate(changed)
    return changed


class Saved:
    """Tensors in a file, and checkpoints of them."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.folder, self.tensors = folder, tensors
        folder.mkdir(exist_ok=True)
        save_file(dict(tensors), folder / "w.safetensors")
        with AdapterFile(folder, "w.safetensors") as file:
            found = read_header(
                *(file.read_at, file.size_bytes, "w.safetensors"),
                max_header_bytes=1 << 20,
                max_tensors=1000,
            )
        self.records: dict[str, TensorRecord] = {record.key: record for record in found}

    def lora(self, module: str, kind: TargetKind = TargetKind.LINEAR, **more: str) -> TargetWeights:
        a, b = self.records[f"{module}.A"], self.records[f"{module}.B"]
        others = {key: self.records[name] for key, name in more.items()}
        return TargetWeights(module, module, kind, a.shape[0], 8.0, SCALE, a, b, **others)

    def checkpoint(
        self,
        *changes: TargetWeights | ExpertWeights | Replacement,
        digest: str = "sha256:" + "1" * 64,
    ) -> Checkpoint:
        fields = {"peft_type": "LORA", "target_modules": ".*", "r": 4}
        config = parse_config(fields, CheckpointLimits())
        lora = {each.name: each for each in changes if isinstance(each, TargetWeights)}
        return Checkpoint(
            *(self.folder, config, lora, digest, 0, True),
            experts=tuple(each for each in changes if isinstance(each, ExpertWeights)),
            replacements=tuple(each for each in changes if isinstance(each, Replacement)),
        )


def values_of(image: Image, layout: Layout) -> dict[tuple[str, SegmentKind], torch.Tensor]:
    """Returns the segments by target and kind, those of experts as bytes."""
    found = {}
    for segment in image.plan.segments:
        data = image.buffer[segment.offset : segment.offset + segment.length_bytes]
        target = layout.targets[segment.target]
        is_experts = target.kind is TargetKind.EXPERTS
        dtype = {**TORCH_DTYPES, DataType.INT32: torch.int32}[segment.dtype]
        values = data if is_experts else data.view(dtype).view(segment.shape)
        found[target.name, segment.kind] = values
    return found


def experts_of(segment: torch.Tensor, num_features: int) -> list[torch.Tensor]:
    """Returns each expert's matrix, as a server reads them."""
    index = segment[: 16 * EXPERTS].view(torch.int32).view(EXPERTS, 4)
    assert (index[:, 2].view(torch.float32) == 1.0).all()
    assert (index[:, 3] == 0).all()
    floats = segment.view(torch.float32)
    return [
        floats[granule * 64 : granule * 64 + rank * num_features].view(rank, num_features)
        for granule, rank in index[:, :2].tolist()
    ]


TURNED = OtherName(f"{W1}_turned", transposed=True)


def hashes_of(weight: torch.Tensor) -> tuple[bytes, ...]:
    return tuple(
        hashlib.sha256(rows.contiguous().view(torch.uint8).numpy().data).digest()
        for rows in weight.split(HASH_ROWS)
    )
