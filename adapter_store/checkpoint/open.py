"""Opens an adapter's checkpoint, if every byte of it is understood, safe and used.

`open_checkpoint` checks, in this order: the config, by the reader of the folder's format, which
files lie beside it, the weights' headers, the tensors' names, that A
and B pair up with the config's ranks on modules the config adapts, and, in one pass over the bytes,
that all values are finite. A checkpoint can be compiled for any layout whose shapes fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from adapter_store.checkpoint.formats.readers import READERS
from adapter_store.checkpoint.formats.select import find_format
from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.tensor_keys import target_of, trained_name
from adapter_store.checkpoint.reading.digest import compute_digest
from adapter_store.checkpoint.reading.files import (
    AnyFolder,
    CheckpointLimits,
    Folder,
    OpenFile,
    open_file,
)
from adapter_store.checkpoint.reading.memory_files import MemoryFolder
from adapter_store.checkpoint.reading.safetensors import Scanned, TensorRecord
from adapter_store.checkpoint.reading.scan import scan_tensors
from adapter_store.checkpoint.scales import check_scales, warnings_of
from adapter_store.checkpoint.tensors import Contents, TargetWeights, read_tensors
from adapter_store.checkpoint.weights import Changes, ExpertWeights, Replacement
from adapter_store.errors import CorruptData, InvalidAdapter
from contract.adapter_files import MAX_CLASS_LABELS
from contract.folders import GivenFolder
from contract.images.dtypes import DataType
from contract.images.segment_kinds import FURTHER_KINDS, SegmentKind

TORCH_DTYPES: Mapping[DataType, torch.dtype] = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DataType.FLOAT8_E5M2: torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked adapter in `folder`. Holds no file open; the files must stay as they are.

    `targets` is keyed and sorted by canonical target name. `is_verified`: the bytes were hashed and
    checked when it was opened; otherwise the reader of all bytes has to compare with `digest`.
    `warnings` are for its trainer, if it is verified.
    """

    folder: AnyFolder
    config: AdapterConfig
    targets: Mapping[str, TargetWeights]
    digest: str
    source_bytes: int
    is_verified: bool
    experts: tuple[ExpertWeights, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def stored_folder(self) -> Folder:
        """Where a store keeps it: only commands read adapters in place."""
        assert not isinstance(self.folder, GivenFolder)
        return self.folder

    @property
    def base_model(self) -> str:
        """The base model that the adapter's config names; "" if it names none."""
        return self.config.base_model

    @property
    def rank(self) -> int:
        """The largest rank of any target."""
        return max((changes.rank for changes in self.changes), default=0)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Distinct last components of the target names, sorted, such as "q_proj"."""
        return tuple(sorted({changes.name.rpartition(".")[2] for changes in self.changes}))

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """Returns, of aLoRA, the tokens from the first of which on it is active, where all of them
        follow one another in the prompt for the last time."""
        return self.config.extras.invocation_tokens

    @property
    def lost_modules(self) -> frozenset[str]:
        """Modules that target_modules lists although the adapter has no weight for them, named as
        targets are."""
        modules = [target.module for target in self.targets.values()]
        modules += [experts.module for experts in self.experts]
        names = {*modules, *map(trained_name, modules)}
        return frozenset(map(target_of, self.config.modules.unweighted(names)))

    @property
    def changes(self) -> Iterator[Changes]:
        """The adapter's weights for each module."""
        return Contents(self.targets, self.experts, self.replacements).changes

    @property
    def records(self) -> tuple[TensorRecord, ...]:
        """All tensors, A before B, in order of target name."""
        return tuple(record for changes in self.changes for _role, record in changes.records())

    @property
    def segment_kinds(self) -> tuple[SegmentKind, ...]:
        """Its contents besides A and B, in order."""
        kinds = {kind for changes in self.changes for kind in changes.kinds}
        return tuple(kind for kind in FURTHER_KINDS if kind in kinds)

    def has_rows(self, num_labels: int) -> bool:
        """Returns whether it has a whole weight of so many rows, which may be a classifier's head:
        only layouts know which weights are one."""
        return any(each.record.shape[:1] == (num_labels,) for each in self.replacements)

    @property
    def may_classify(self) -> bool:
        """Whether it has a whole matrix with no more rows than a classifier's head may have."""
        shapes = [each.record.shape for each in self.replacements]
        return any(len(shape) == 2 and shape[0] <= MAX_CLASS_LABELS for shape in shapes)

    @contextmanager
    def open_files(self) -> Iterator[Mapping[str, OpenFile]]:
        """The weight files by name, open while the context lasts."""
        files: dict[str, OpenFile] = {}
        try:
            for name in sorted({record.file for record in self.records}):
                files[name] = open_file(self.folder, name)
            yield files
        finally:
            for file in files.values():
                file.close()

    def read_tensor(self, record: TensorRecord) -> torch.Tensor:
        """Reads one tensor as saved, in its own dtype and shape, into new memory.

        Raises CorruptData if the file has become shorter.
        """
        data = np.empty(record.length_bytes, np.uint8)
        with open_file(self.folder, record.file) as file:
            file.read_into(record.offset, data.data)
        return torch.from_numpy(data).view(TORCH_DTYPES[record.dtype]).view(record.shape)

    def verify(self) -> None:
        """Reads every byte, unless that was done on opening. Raises CorruptData if the content does
        not have the digest `digest`."""
        if self.is_verified:
            return
        try:
            scanned = scan_tensors(self.folder, self.records)
        except InvalidAdapter as exc:
            raise self.corrupt() from exc
        if self.compute_digest(_hashes(scanned)) != self.digest:
            raise self.corrupt()

    def corrupt(self) -> CorruptData:
        """Returns the error for bytes that do not have the digest `digest`."""
        return CorruptData(
            f"the stored source of {self.digest} no longer has this digest", subject=self.digest
        )

    def compute_digest(self, sha256: Mapping[str, bytes]) -> str:
        """Computes the digest from the sha256 of each tensor's raw bytes, by tensor key."""
        return compute_digest(self.config, self.changes, sha256)


def open_checkpoint(
    folder: AnyFolder,
    limits: CheckpointLimits | None = None,
    *,
    digest: str | None = None,
    config: AdapterConfig | None = None,
) -> Checkpoint:
    """Opens the adapter in `folder`.

    With `digest`, the folder is a blob that was checked when it was stored: its structure is
    checked again; its bytes are not read now, but compared with the digest when it is compiled.
    With `config`, that is taken for the contents of the folder's own file.

    Raises:
        InvalidAdapter: `subject` names the file, tensor or config key, `reason` the rule.
        LimitExceeded: the weights are over `limits.max_source_bytes`.
        CorruptData: a file got shorter meanwhile.
    """
    limits = limits or CheckpointLimits()
    reader = READERS[find_format(folder)]
    config = config or reader.read_config(folder, limits)
    records, source_bytes = read_tensors(folder, limits)
    contents = reader.read_contents(records, config)
    is_verified, warnings = digest is None, tuple[str, ...]()
    if digest is None:
        scanned = folder.scanned(records) if isinstance(folder, MemoryFolder) else None
        if scanned is None:
            scanned = scan_tensors(folder, records)
        check_scales(contents, config)
        digest = compute_digest(config, contents.changes, _hashes(scanned))
        warnings = warnings_of(contents, scanned)
    return Checkpoint(
        folder,
        config,
        contents.targets,
        digest,
        source_bytes,
        is_verified,
        experts=contents.experts,
        replacements=contents.replacements,
        warnings=warnings,
    )


def _hashes(scanned: Mapping[str, Scanned]) -> dict[str, bytes]:
    return {key: each.sha256 for key, each in scanned.items()}
