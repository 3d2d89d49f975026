"""Makes a copy of an adapter without the base weights that PEFT saves beside it.

PEFT saves the embedding and the head along when they are adapted or were resized
(`save_embedding_layers="auto"`). Where they equal the base model's, an adapter computes the same
without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adapter_store.checkpoint.base_weights import BaseModel, open_safetensors
from adapter_store.checkpoint.files import (
    CONFIG_FILE,
    MLX_WEIGHTS_FILE,
    WEIGHTS_FILE,
    CheckpointLimits,
    changed_copy,
    check_folders,
)
from adapter_store.checkpoint.formats.select import find_weight_files
from adapter_store.checkpoint.tensor_keys import PREFIX, is_base_weight, target_of
from servicekit.errors import FailedPrecondition


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
    of which is compared with the one of `model`, a folder as transformers saves one.

    Returns the base weights, and how many tensors are left. Raises InvalidArgument if `target`
    exists or a folder is none, InvalidAdapter for files that are no adapter's, and
    FailedPrecondition if a base weight differs from the model's, unless `force`.
    """
    check_folders(source, target)
    files, _ = find_weight_files(source, CheckpointLimits())
    base = None if model is None else BaseModel(model)
    kept: dict[str, torch.Tensor] = {}
    found: list[BaseWeight] = []
    for name in files:
        with open_safetensors(source / name) as file:
            for key in file.keys():  # noqa: SIM118  it is no mapping
                if is_base_weight(key):
                    found.append(_compared(file.get_slice(key), key, base))
                else:
                    kept[key] = file.get_tensor(key)
    changed = [each for each in found if each.difference]
    if changed and not force:
        raise FailedPrecondition(
            f"{changed[0].name} {changed[0].difference}: without it the adapter would compute "
            "something else; --force strips it all the same",
            subject=changed[0].name,
        )
    weights = MLX_WEIGHTS_FILE if MLX_WEIGHTS_FILE in files else WEIGHTS_FILE
    with changed_copy(source, target) as folder:
        (folder / CONFIG_FILE).write_bytes((source / CONFIG_FILE).read_bytes())
        save_file(kept, folder / weights, {"format": "pt"})
    return found, len(kept)


def _compared(saved: Any, key: str, base: BaseModel | None) -> BaseWeight:
    name = target_of(key.replace(".base_layer.", ".").replace(PREFIX, ""))
    difference = None if base is None else base.difference(name, saved)
    return BaseWeight(name, tuple(saved.get_shape()), difference)
