"""Makes a copy of an adapter without the base weights that PEFT saves beside it.

PEFT saves the embedding and the head along when they are adapted or were resized
(`save_embedding_layers="auto"`). Where they equal the base model's, an adapter computes the same
without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from adapter_store.checkpoint.files import (
    CONFIG_FILE,
    MLX_WEIGHTS_FILE,
    WEIGHTS_FILE,
    CheckpointLimits,
)
from adapter_store.checkpoint.formats.select import find_weight_files
from adapter_store.checkpoint.tensor_keys import PREFIX, is_base_weight, target_of
from adapter_store.errors import InvalidAdapter
from servicekit.errors import FailedPrecondition, InvalidArgument

ROWS_AT_ONCE = 8192
MODEL_FILES = "*.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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
    if target.exists():
        raise InvalidArgument(f"{target} exists: nothing is overwritten", subject=str(target))
    if not source.is_dir():
        raise InvalidArgument(
            f"{source} is no folder: give one with {CONFIG_FILE}, as PEFT saves it",
            subject=str(source),
        )
    files, _ = find_weight_files(source, CheckpointLimits())
    base = {} if model is None else _tensors(model)
    kept: dict[str, torch.Tensor] = {}
    found: list[BaseWeight] = []
    for name in files:
        with _opened(source / name) as file:
            for key in file.keys():  # noqa: SIM118  it is no mapping
                if is_base_weight(key):
                    found.append(_compared(file.get_slice(key), key, base, model))
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
    _write(target, (source / CONFIG_FILE).read_bytes(), weights, kept)
    return found, len(kept)


def _write(target: Path, config: bytes, weights: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Makes the folder whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder) / target.name
        made.mkdir()
        (made / CONFIG_FILE).write_bytes(config)
        save_file(dict(tensors), made / weights, {"format": "pt"})
        made.rename(target)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise InvalidAdapter(
            f"{path}: {error}", subject=path.name, reason="FILE_NOT_SAFETENSORS"
        ) from error


def _tensors(model: Path) -> dict[str, tuple[Path, str]]:
    """Returns the file and the name of each of a model's tensors, by the name of its text model."""
    found: dict[str, tuple[Path, str]] = {}
    for path in sorted(model.glob(MODEL_FILES)):
        with _opened(path) as file:
            found |= {target_of(key): (path, key) for key in file.keys()}  # noqa: SIM118
    if not found:
        raise InvalidArgument(f"{model} has no {MODEL_FILES}", subject=str(model))
    return found


def _compared(
    saved: Any, key: str, base: Mapping[str, tuple[Path, str]], model: Path | None
) -> BaseWeight:
    name = target_of(key.replace(".base_layer.", ".").replace(PREFIX, ""))
    shape = tuple(saved.get_shape())
    if model is None:
        return BaseWeight(name, shape, None)
    place = base.get(name)
    if place is None and name == HEAD:  # tied
        place = base.get(EMBEDDING)
    if place is None:
        return BaseWeight(name, shape, f"is no tensor of {model}")
    path, own = place
    with _opened(path) as file:
        return BaseWeight(name, shape, _difference(saved, file.get_slice(own)))


def _difference(saved: Any, base: Any) -> str:
    """Returns how many rows differ from the base's, in whose dtype they are compared: a copy that
    was saved wider is equal if narrowing it loses nothing."""
    shape, wanted = list(saved.get_shape()), list(base.get_shape())
    if shape != wanted:
        num_added = shape[0] - wanted[0] if shape[1:] == wanted[1:] else 0
        added = f": {num_added} tokens were added" if num_added > 0 else ""
        return f"is {shape}, and the base's {wanted}{added}"
    num_changed = 0
    for start in range(0, shape[0], ROWS_AT_ONCE):
        rows = saved[start : start + ROWS_AT_ONCE]
        expected = base[start : start + ROWS_AT_ONCE]
        same = rows.to(expected.dtype) == expected
        same &= expected.to(rows.dtype) == rows
        num_changed += int((~same.reshape(len(rows), -1).all(1)).sum())
    return f"differs from the base's in {num_changed} of {shape[0]} rows" if num_changed else ""
