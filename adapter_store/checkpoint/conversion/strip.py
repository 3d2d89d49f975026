"""Makes a copy of an adapter without the base weights that PEFT saves beside it.

PEFT saves the embedding and the head along when they are adapted or were resized
(`save_embedding_layers="auto"`). Where they equal the base model's, an adapter computes the same
without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapter_store.checkpoint.conversion.base_weights import BaseModel, SavedTensor
from adapter_store.checkpoint.formats.select import Format, find_format
from adapter_store.checkpoint.peft.tensor_keys import PREFIX, is_base_weight, target_of
from adapter_store.checkpoint.reading.files import (
    COPY_BYTES,
    CheckpointLimits,
    changed_copy,
    check_folders,
    open_file,
    read_capped,
)
from adapter_store.checkpoint.reading.safetensors import TensorRecord, encode_header
from adapter_store.checkpoint.tensors import read_tensors
from contract.adapter_files import CONFIG_FILE, MLX_WEIGHTS_FILE, WEIGHTS_FILE
from contract.folders import GivenFolder
from contract.tensor_names import unwrapped
from servicekit.errors import FailedPrecondition

LIMITS = CheckpointLimits()


@dataclass(frozen=True, slots=True)
class BaseWeight:
    """A base weight of an adapter. `difference` says how it differs from the model's, "" if it does
    not; None: it was not compared."""

    name: str
    shape: tuple[int, ...]
    difference: str | None


def strip(
    source: Path, target: Path, model: Path | None = None, *, force: bool = False
) -> tuple[list[BaseWeight], int]:
    """Writes the adapter in folder `source` to the new folder `target`, without base weights, each
    of which is compared with the weight of `model`, a folder as transformers saves one.

    Returns the base weights, and how many tensors are left. Raises InvalidArgument if `target`
    exists or a folder is none, InvalidAdapter for files that are no adapter's, and
    FailedPrecondition if a base weight differs from the model's, unless `force`.
    """
    check_folders(source, target)
    base = None if model is None else BaseModel(model)
    with GivenFolder(source) as folder:
        records, _ = read_tensors(folder, LIMITS)
        found = [_compared(folder, each, base) for each in records if is_base_weight(each.key)]
        changed = [each for each in found if each.difference]
        if changed and not force:
            raise FailedPrecondition(
                f"{changed[0].name} {changed[0].difference}: without it the adapter would compute "
                "something else; --force strips it all the same",
                subject=changed[0].name,
            )
        kept = [each for each in records if not is_base_weight(each.key)]
        weights = MLX_WEIGHTS_FILE if find_format(folder) is Format.MLX else WEIGHTS_FILE
        config = read_capped(folder, CONFIG_FILE, LIMITS.max_config_bytes)
        with changed_copy(folder, target) as made:
            (made / CONFIG_FILE).write_bytes(config)
            _copy_tensors(folder, kept, made / weights)
    return found, len(kept)


def _compared(folder: GivenFolder, record: TensorRecord, base: BaseModel | None) -> BaseWeight:
    name = target_of(unwrapped(record.key).replace(".base_layer.", ".").replace(PREFIX, ""))
    if base is None:
        return BaseWeight(name, record.shape, None)
    with open_file(folder, record.file) as file:
        return BaseWeight(name, record.shape, base.difference(name, SavedTensor(file, record)))


def _copy_tensors(folder: GivenFolder, records: list[TensorRecord], path: Path) -> None:
    """Writes tensors, as they are, to a new file."""
    records = sorted(records, key=lambda each: -each.dtype.itemsize)  # so all are aligned
    with path.open("xb") as copy:
        copy.write(encode_header((each.key, each.dtype, each.shape) for each in records))
        for each in records:
            end = each.offset + each.length_bytes
            with open_file(folder, each.file) as file:
                for start in range(each.offset, end, COPY_BYTES):
                    copy.write(file.read_at(start, min(COPY_BYTES, end - start)))
