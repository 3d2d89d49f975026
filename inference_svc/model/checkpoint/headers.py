"""The contents of the headers of a checkpoint's files: its tensors, where they lie, and the linear
layers of towers that are not served."""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import GGUF, INDEX, MAX_HEADER_BYTES, SINGLE, weight_files
from inference_svc.model.checkpoint.wrapper import Wrapper

PIECE_BYTES = 1 << 20
"""The bytes that are read at once."""
_WEIGHT = ".weight"
_NF4_STATE = ".quant_state.bitsandbytes__nf4"
_MAX_STATE_BYTES = 4096
"""More than the facts of a packed weight have; each may be in the same place of a file."""
_MAX_SIZE = 1 << 24
"""More inputs or outputs than a layer has."""


class StoredTensor(NamedTuple):
    """A tensor's place in a file; `dtype` by its name in safetensors, or another where the file has
    the values in another form."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class TowerModule(NamedTuple):
    """A linear layer of a tower that is not served, or a norm, which has no inputs. `names` are its
    possible names, of the newest transformers first."""

    tower: str
    names: tuple[str, ...]
    in_features: int
    out_features: int


def stored_tensors(model_dir: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of a model's folder by name. Raises UnsupportedModel for a file that is
    neither of safetensors nor GGUF."""
    for path in weight_files(model_dir):
        yield from _read_gguf(path) if path.suffix == GGUF else _read(path)


def tensor_names(model_dir: Path) -> list[str]:
    """Returns the names of the tensors in a model's folder, by its index if it has one; none where
    the weights are not there, or broken, which their reader reports."""
    index = model_dir / INDEX
    try:
        if not (model_dir / SINGLE).exists() and index.exists():
            return list(json.loads(index.read_bytes())["weight_map"])
        return [name for name, _ in stored_tensors(model_dir)]
    except (UnsupportedModel, OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def tensors_named(
    model_dir: Path, wrapper: Wrapper, names: Collection[str]
) -> dict[str, StoredTensor]:
    """Returns the tensors of a model's text part that have these names; none where the weights are
    not there, or broken, which their reader reports."""
    try:
        found = ((wrapper.text_name(name), each) for name, each in stored_tensors(model_dir))
        return {name: each for name, each in found if name is not None and name in names}
    except UnsupportedModel:
        return {}


def is_same_content(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns whether two tensors have the same values, as bytes."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.start)
        other.seek(second.start)
        left = first.num_bytes
        while left:
            size = min(left, PIECE_BYTES)
            piece = one.read(size)
            if not piece or piece != other.read(len(piece)):
                return False
            left -= len(piece)
    return True


def tower_modules(
    model_dir: Path, wrapper: Wrapper, *, with_norms: bool = False
) -> tuple[TowerModule, ...]:
    """Returns the tensors that can be linear layers, or norms if asked, by their shapes, of the
    towers that a whole model has beside its text part, in the order of their names. Raises as
    `stored_tensors`."""
    found = []
    stored = dict(sorted(stored_tensors(model_dir))) if wrapper.others else {}
    for name, tensor in stored.items():
        state = stored.get(f"{name}{_NF4_STATE}")
        shape = tensor.shape if state is None else _nf4_shape(state)
        is_known = len(shape) == 2 or (with_norms and len(shape) == 1)
        if is_known and name.endswith(_WEIGHT) and wrapper.text_name(name) is None:
            names = wrapper.tower_names(name.removesuffix(_WEIGHT))
            num_out, num_in = (*shape, 0)[:2]
            found.append(TowerModule(wrapper.tower_of(name), names, num_in, num_out))
    return tuple(found)


def _nf4_shape(state: StoredTensor) -> tuple[int, ...]:
    """Returns the shape of a weight that bitsandbytes packed, whose own tensor is a row of bytes;
    () if its facts are broken, which the reader of weights reports."""
    if state.num_bytes > _MAX_STATE_BYTES:
        return ()
    try:
        with state.path.open("rb") as file:
            file.seek(state.start)
            shape = tuple(json.loads(file.read(state.num_bytes))["shape"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ()
    is_known = all(type(size) is int and 0 < size <= _MAX_SIZE for size in shape)
    return shape if is_known else ()


def _read_gguf(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    from inference_svc.model.gguf.tensors import Change, tensors  # imports torch

    for each in tensors(path):
        stored, dtype = each.stored, each.stored.type.name
        if each.change is not Change.NONE:
            dtype = f"{dtype}, {each.change.value}"
        yield each.name, StoredTensor(path, dtype, stored.shape, stored.start, stored.num_bytes)


def _read(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with path.open("rb") as file:
            header_bytes, file_bytes = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if header_bytes > min(file_bytes, MAX_HEADER_BYTES):
                raise ValueError("its header ends after the file, or is too large")
            header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = map(operator.index, entry["data_offsets"])
                if not 0 <= start <= end <= file_bytes - 8 - header_bytes:
                    raise ValueError(f"{name} lies outside of it")
                place = 8 + header_bytes + start, end - start
                yield name, StoredTensor(path, entry["dtype"], tuple(entry["shape"]), *place)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error!r}") from error
