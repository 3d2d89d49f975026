"""Decides which trainer's format a folder is in, by the names of its files, and finds its weights.

A folder holds one adapter in one format: PEFT's `adapter_model.safetensors`, single or in shards
with their index, or MLX-LM's `adapters.safetensors`. Both have an `adapter_config.json`, of two
kinds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from adapter_store.checkpoint.reading.files import (
    AnyFolder,
    CheckpointLimits,
    has_file,
    list_names,
    parse_index,
    read_capped,
)
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MLX_WEIGHTS_FILE,
    PICKLE_FILES,
    WEIGHTS_FILE,
    is_adapter_file,
    is_shard,
)
from contract.folders import shown
from contract.side_files import find_unused


class Format(enum.Enum):
    """How an adapter is saved; the value is for people."""

    PEFT = "PEFT"
    MLX = "MLX-LM"


def find_format(folder: AnyFolder) -> Format:
    """Returns the format of the adapter in `folder`, whether or not it is whole."""
    return Format.MLX if has_file(folder, MLX_WEIGHTS_FILE) else Format.PEFT


def check_file_names(names: Iterable[str]) -> None:
    """Checks that a folder with these files holds one adapter, and nothing else that would have to
    be applied. Names with slashes are of other folders.

    Raises InvalidAdapter: FILES_AMBIGUOUS or FILE_UNUSED.
    """
    present = {name for name in names if "/" not in name}
    own = {name for name in present if is_adapter_file(name)}
    is_mlx = MLX_WEIGHTS_FILE in own
    others = own - {CONFIG_FILE, MLX_WEIGHTS_FILE}
    if is_mlx and others:
        raise InvalidAdapter(
            f"both {MLX_WEIGHTS_FILE}, as MLX-LM saves weights, and {min(others)}, as PEFT does, "
            "are present: register a folder with one of them",
            subject=MLX_WEIGHTS_FILE,
            reason="FILES_AMBIGUOUS",
        )
    unused = find_unused(present - own, is_mlx=is_mlx)
    if unused is not None:
        name = shown(unused.name)
        raise InvalidAdapter(
            f"{name}: {unused.what}: nothing would apply it. If your adapter works without it, "
            "register a folder without it",
            subject=name,
            reason="FILE_UNUSED",
        )


def find_weight_files(
    folder: AnyFolder, limits: CheckpointLimits
) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """Returns the names of the weight files, and for a sharded adapter its index {tensor: file}.

    Raises:
        InvalidAdapter: FILE_NOT_SAFETENSORS, FILES_AMBIGUOUS, FILE_UNUSED or INDEX_INVALID.
    """
    names = list_names(folder)
    if WEIGHTS_FILE in names and INDEX_FILE in names:
        raise InvalidAdapter(
            f"both {WEIGHTS_FILE} and {INDEX_FILE} are present",
            subject=INDEX_FILE,
            reason="FILES_AMBIGUOUS",
        )
    index = None
    if INDEX_FILE in names:
        index = parse_index(read_capped(folder, INDEX_FILE, limits.max_header_bytes), limits)
    for name in sorted(filter(is_shard, names.difference((index or {}).values()))):
        raise InvalidAdapter(
            f"{name} is in no index, so its tensors would stay unused",
            subject=name,
            reason="FILE_UNUSED",
        )
    is_whole = index is not None or not names.isdisjoint((WEIGHTS_FILE, MLX_WEIGHTS_FILE))
    pickle = next((name for name in PICKLE_FILES if name in names), None)
    if not is_whole and pickle is not None:
        raise InvalidAdapter(
            f"{pickle}: pickled weights can run code; save them as {WEIGHTS_FILE}",
            subject=pickle,
            reason="FILE_NOT_SAFETENSORS",
        )
    check_file_names(names)
    if index is not None:
        return tuple(sorted(set(index.values()))), index
    return (MLX_WEIGHTS_FILE if MLX_WEIGHTS_FILE in names else WEIGHTS_FILE,), None
