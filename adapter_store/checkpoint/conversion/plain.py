"""A stored adapter as a plain LoRA in PEFT's format, which other engines apply wholly.

Engines differ in the fields of PEFT's config that they apply: see `loadout check --engine`. A plain
LoRA leaves nothing to them. It has A and B of modules, and nothing else. All modules have one rank,
the largest, and lower ones are filled up with zeros, which add nothing. The scale of each module is
folded into B in float32, so that alpha is the rank and the scale is 1. Whatever a LoRA cannot
express is refused by name.

The files are made one tensor at a time. Each tensor is hashed as it is read: the last file is
complete only if the source still has its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from adapter_store.checkpoint.features import WORDS, Feature, features_in
from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint
from adapter_store.checkpoint.peft.extras import EMBEDDINGS
from adapter_store.checkpoint.peft.tensor_keys import PREFIX
from adapter_store.checkpoint.peft.towers import tower_of
from adapter_store.checkpoint.reading.files import OpenFile
from adapter_store.checkpoint.reading.safetensors import TensorRecord, encode_header
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.errors import IncompatibleAdapter
from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from contract.images.dtypes import DataType
from contract.images.targets import TargetKind

PLAIN = frozenset({Feature.LINEAR, Feature.EMBEDDING, Feature.HEAD, Feature.FUSED, Feature.EXPERTS})
"""Features that A and B of modules express. Fields of the config are not among them: they are
written in another way, but for invocation tokens."""
COPIES_HELP = "if it equals the base model's, `loadout strip` makes an adapter without it"
WIDEST_BYTES = 4
"""The size of a value of A or B while it is written, in float32."""


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Bytes that follow the earlier ones of a file."""

    file: str
    data: memoryview


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor to write: of a target, A or B."""

    key: str
    dtype: DataType
    shape: tuple[int, int]
    target: TargetWeights
    is_a: bool

    @property
    def record(self) -> TensorRecord:
        return self.target.a if self.is_a else self.target.b

    @property
    def work_bytes(self) -> int:
        """The memory that it takes to make it: as saved, in float32, and as written."""
        num_values = self.shape[0] * self.shape[1]
        return self.record.length_bytes + 2 * WIDEST_BYTES * num_values


class PlainLora:
    """The files of a checkpoint's plain LoRA. `sizes` are their bytes by name, in the order in
    which they are written; `work_bytes` is the most memory that writing takes.

    Raises IncompatibleAdapter NOT_PLAIN_LORA, with the first such feature as its subject, for an
    adapter that no plain LoRA computes.
    """

    def __init__(self, checkpoint: Checkpoint, base_model: str) -> None:
        _check(checkpoint)
        self._checkpoint = checkpoint
        self.rank = checkpoint.rank
        targets = checkpoint.targets.values()
        self._outputs = tuple(
            self._output(target, is_a) for target in targets for is_a in (True, False)
        )
        self._header = encode_header((each.key, each.dtype, each.shape) for each in self._outputs)
        self._config = self._encode_config(base_model)
        weights = sum(_num_bytes(each.dtype, each.shape) for each in self._outputs)
        self.sizes: Mapping[str, int] = {
            CONFIG_FILE: len(self._config),
            WEIGHTS_FILE: len(self._header) + weights,
        }
        self.work_bytes = max(each.work_bytes for each in self._outputs)

    def pieces(self) -> Iterator[FileBytes]:
        """Yields the bytes of the files in order, a tensor at a time. Blocks while it reads.

        Raises CorruptData instead of the last piece if the source no longer has its digest, and
        IncompatibleAdapter CAST_OVERFLOW for values that are not finite after scaling.
        """
        yield FileBytes(CONFIG_FILE, memoryview(self._config))
        yield FileBytes(WEIGHTS_FILE, memoryview(self._header))
        hashes: dict[str, bytes] = {}
        with self._checkpoint.open_files() as files:
            for index, output in enumerate(self._outputs):
                data = self._write(output, files[output.record.file], hashes)
                is_last = index == len(self._outputs) - 1
                if is_last and self._checkpoint.compute_digest(hashes) != self._checkpoint.digest:
                    raise self._checkpoint.corrupt()
                yield FileBytes(WEIGHTS_FILE, data)

    def _output(self, target: TargetWeights, is_a: bool) -> _Output:
        suffix = "A" if is_a else "B"
        if target.kind is TargetKind.EMBEDDING:
            key = f"{PREFIX}{target.module}.lora_embedding_{suffix}"
        else:
            key = f"{PREFIX}{target.module}.lora_{suffix}.weight"
        if is_a:
            return _Output(key, target.a.dtype, (self.rank, target.in_features), target, is_a)
        dtype = target.b.dtype if target.scale == 1 else DataType.FLOAT32
        return _Output(key, dtype, (target.out_features, self.rank), target, is_a)

    def _encode_config(self, base_model: str) -> bytes:
        modules = sorted(target.module for target in self._checkpoint.targets.values())
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": modules,
        }
        return f"{json.dumps(config, indent=2)}\n".encode()

    def _write(self, output: _Output, file: OpenFile, hashes: dict[str, bytes]) -> memoryview:
        """Returns a tensor's bytes, and adds the hash of the saved ones."""
        record, target = output.record, output.target
        saved = np.empty(record.length_bytes, np.uint8)
        file.read_into(record.offset, saved.data)
        hashes[record.key] = hashlib.sha256(saved.data).digest()
        dtype = TORCH_DTYPES[record.dtype]
        values = torch.from_numpy(saved).view(dtype).view(record.shape)
        if target.is_transposed:
            values = values.T
        if not output.is_a and target.scale != 1:
            values = values.float() * target.scale
            if not torch.isfinite(values).all():
                raise IncompatibleAdapter(
                    f"{record.key}: values are not finite after scaling by {target.scale:g}",
                    subject=record.key,
                    reason="CAST_OVERFLOW",
                )
        made = torch.zeros(output.shape, dtype=TORCH_DTYPES[output.dtype])
        made[: values.shape[0], : values.shape[1]] = values
        return made.view(torch.uint8).numpy().data.cast("B")


def _num_bytes(dtype: DataType, shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * dtype.itemsize


def _check(checkpoint: Checkpoint) -> None:
    """Raises IncompatibleAdapter NOT_PLAIN_LORA, which names each feature that is no plain LoRA's,
    with a module that has it."""
    found: dict[Feature, str] = {}
    for changes in checkpoint.changes:
        for feature in features_in(changes):
            if feature not in PLAIN:
                found.setdefault(feature, changes.name)
    for experts in checkpoint.experts:  # A or B of all experts in one tensor
        found.setdefault(Feature.EXPERTS, experts.name)
    details = [f"{WORDS[feature]}, as of {name}" for feature, name in found.items()]
    subjects = [feature.value for feature in found]
    if Feature.SAVED_ALONG in found:
        details.append(COPIES_HELP)
    if checkpoint.invocation_tokens:
        details.append(WORDS[Feature.ALORA])
        subjects.append(Feature.ALORA.value)
    if checkpoint.config.extras.ties_embeddings:
        tied = (name for name in checkpoint.targets if name.rpartition(".")[2] in EMBEDDINGS)
        if name := next(tied, ""):
            details.append(
                f"one change of embedding and head (`ensure_weight_tying`), as of {name}"
            )
            subjects.append("ensure_weight_tying")
    tower = next(filter(None, map(tower_of, checkpoint.targets)), "")
    if tower:
        details.append(f"modules of {tower}, which engines ignore")
        subjects.append(tower)
    if details:
        raise IncompatibleAdapter(
            "this adapter is more than a plain LoRA, which other engines apply wholly: "
            f"{'; '.join(details)}",
            subject=subjects[0],
            reason="NOT_PLAIN_LORA",
        )
