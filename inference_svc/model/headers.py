"""What the headers of a checkpoint's files say: its tensors, and the linear layers of towers that
are not served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import Wrapper
from inference_svc.model.files import weight_files

_WEIGHT = ".weight"


class StoredTensor(NamedTuple):
    """A tensor's place in a file; `dtype` by its name in safetensors."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class TowerModule(NamedTuple):
    """A linear layer of a tower that is not served. `names` are those that it goes by, of the
    newest transformers first."""

    tower: str
    names: tuple[str, ...]
    in_features: int
    out_features: int


def stored_tensors(model_dir: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of a model's folder by name. Raises UnsupportedModel for a file that is
    not of safetensors."""
    for path in weight_files(model_dir):
        yield from _read(path)


def tower_modules(model_dir: Path, wrapper: Wrapper) -> tuple[TowerModule, ...]:
    """Returns what can be a linear layer, by its shape, of the towers that a whole model has beside
    its text part, in the order of their names. Raises as `stored_tensors`."""
    found = []
    for name, tensor in sorted(stored_tensors(model_dir)) if wrapper.others else ():
        is_matrix = name.endswith(_WEIGHT) and len(tensor.shape) == 2
        if is_matrix and wrapper.text_name(name) is None:
            names = wrapper.tower_names(name.removesuffix(_WEIGHT))
            num_out, num_in = tensor.shape
            found.append(TowerModule(wrapper.tower_of(name), names, num_in, num_out))
    return tuple(found)


def _read(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > path.stat().st_size:
                raise ValueError("its header ends behind it")
            header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                place = 8 + header_bytes + start, end - start
                yield name, StoredTensor(path, entry["dtype"], tuple(entry["shape"]), *place)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error!r}") from error
