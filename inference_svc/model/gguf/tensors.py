"""The tensors of a GGUF file's model, under the names and with the values that transformers has."""

from __future__ import annotations

import enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import LM_HEAD
from inference_svc.model.gguf.blocks import decode
from inference_svc.model.gguf.families import EMBEDDING, HEAD, ROPE_FACTORS, Family, family_of
from inference_svc.model.gguf.file import PLAIN, Header, StoredTensor, read_header
from inference_svc.model.gguf.metadata import Values

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DECODED_ROWS = 1024
"""Rows of a table that are dequantised at once."""
_OPEN_FILES = 2


class Change(enum.Enum):
    """A change of values that the converter makes, and reading takes back."""

    NONE = "none"
    INTERLEAVED = "interleaved"
    ADDED_ONE = "added one"


class ModelTensor(NamedTuple):
    """A tensor of the model. `dtype` is by its name in safetensors, or the type of blocks if it
    `is_matrix` in few bits: then `shape` is [out, bytes of a row], else the shape of its values.
    `head_size` rows are interleaved with each other; 0: none. If it `is_tied_head`, it is the
    embedding once more, as the head computes with it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: StoredTensor
    change: Change = Change.NONE
    head_size: int = 0
    is_tied_head: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a linear layer. Others are dequantised on reading: tables,
        of which single rows are read, and norms."""
        is_table = self.stored.name == EMBEDDING and not self.is_tied_head
        return len(self.stored.shape) == 2 and not is_table


def tensors(path: Path) -> list[ModelTensor]:
    """Returns the tensors of a file's model, in the order of their bytes. Raises UnsupportedModel
    for a file that cannot be read, or of another family."""
    return list(_contents(path).values())


def read(path: Path, name: str) -> Tensor:
    """Reads all of a tensor, by its name in the model; see `GgufRows` for its shape. Raises
    UnsupportedModel if the file cannot be read."""
    return GgufRows(path, name)[:]


class GgufRows:
    """A tensor of a file, by its name in the model, of which rows are read by indexing it: of a
    matrix in few bits blocks, uint8 [N, bytes of a row], else values. Nothing of the file stays
    mapped.

    Indexing raises UnsupportedModel where the file cannot be read, or a scale of a table is not
    finite.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._tensor = path, _contents(path)[name]

    def __getitem__(self, index: Any) -> Tensor:
        num_rows = self._tensor.shape[0]
        if not isinstance(index, slice) or index.step not in (None, 1):
            return self._rows(0, num_rows)[index]
        start, stop, _ = index.indices(num_rows)
        stop = max(start, stop)
        # Rows of a head are interleaved with each other.
        size = self._tensor.head_size or 1
        first, end = start // size * size, -(-stop // size) * size
        return self._rows(first, end)[start - first : stop - first]

    def _rows(self, start: int, stop: int) -> Tensor:
        tensor, stored = self._tensor, self._tensor.stored
        shape = (stop - start, *stored.shape[1:])
        row_bytes = stored.num_bytes // stored.shape[0]
        first = stored.start + start * row_bytes
        values = _read_bytes(self._path, first, (stop - start) * row_bytes)
        if stored.type.name in PLAIN:
            return _unchanged(values.view(_DTYPES[stored.type.name]).view(shape), tensor)
        if tensor.is_matrix:
            return _unchanged(values.view(stop - start, row_bytes), tensor)
        return _unchanged(_decoded(values, stored._replace(shape=shape)), tensor)


def read_plain(header: Header, stored: StoredTensor) -> Tensor:
    """Reads a tensor that is no weight, fp32 [size]. Raises UnsupportedModel for another form."""
    if stored.type.name != "F32" or len(stored.shape) != 1:
        raise UnsupportedModel(f"{header.path}: the tensor {stored.name} must be a vector of F32")
    return _read_bytes(header.path, stored.start, stored.num_bytes).view(torch.float32)


def model_tensors(header: Header) -> list[ModelTensor]:
    """Returns the tensors of a header's model. Raises UnsupportedModel for another family."""
    family, values = family_of(header), Values(header)
    stored = {each.name: each for each in header.tensors if each.name != ROPE_FACTORS}
    found = [_model_tensor(family, values, each) for each in stored.values()]
    table = stored.get(EMBEDDING)
    if table is not None and HEAD not in stored and table.type.name not in PLAIN:
        found.append(_tied_head(table))
    return found


def _tied_head(table: StoredTensor) -> ModelTensor:
    """Returns the head of a file whose embedding is in few bits, and the head, too."""
    shape = table.shape[0], table.type.bytes_of(table.shape[1])
    return ModelTensor(f"{LM_HEAD}.weight", shape, table.type.name, table, is_tied_head=True)


def _model_tensor(family: Family, values: Values, stored: StoredTensor) -> ModelTensor:
    end = stored.name.rpartition(".")[2]
    name = f"{family.module_of(stored.name)}.{end}"
    change, head_size = Change.NONE, 0
    if family.adds_one and name.endswith("norm.weight"):
        change = Change.ADDED_ONE
    part = stored.name.split(".")[-2]
    if family.permutes and part in ("attn_q", "attn_k"):
        change = Change.INTERLEAVED
        num_heads = values.num_heads(is_of_keys=part == "attn_k")
        if stored.shape[0] % (2 * num_heads):
            raise values.fail_of(stored.name, f"{stored.shape[0]} rows for {num_heads} heads")
        head_size = stored.shape[0] // num_heads
    tensor = ModelTensor(name, stored.shape, stored.type.name, stored, change, head_size)
    if stored.type.name in PLAIN:
        return tensor
    if len(stored.shape) != 2:
        raise values.fail_of(stored.name, f"{stored.type.name}, which only matrices may have")
    if not tensor.is_matrix:
        return tensor._replace(dtype="F32")
    return tensor._replace(shape=(stored.shape[0], stored.type.bytes_of(stored.shape[1])))


def _contents(path: Path) -> dict[str, ModelTensor]:
    """Returns the tensors of a file's model by their names."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return _contents_of(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(_OPEN_FILES)
def _contents_of(path: Path, stamp: tuple[int, int, int]) -> dict[str, ModelTensor]:
    """Reads a header once for all tensors of a file, until this is written anew: a vocabulary takes
    a tenth of a second."""
    return {each.name: each for each in model_tensors(read_header(path))}


def _read_bytes(path: Path, start: int, num_bytes: int) -> Tensor:
    """Returns uint8 [bytes], copied: pages of a mapping would count as ours."""
    found = torch.empty(num_bytes, dtype=torch.uint8)
    array: Any = found.numpy()
    left = memoryview(array)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while left:
                count = file.readinto(left)
                if not count:
                    raise UnsupportedModel(f"{path} has become shorter while it was read")
                left = left[count:]
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return found


def _decoded(values: Tensor, stored: StoredTensor) -> Tensor:
    """Returns fp32 of the tensor's shape."""
    found = torch.empty(stored.shape)
    rows = found.view(-1, stored.shape[-1])
    blocks = values.view(len(rows), stored.type.bytes_of(stored.shape[-1]))
    for start in range(0, len(rows), _DECODED_ROWS):
        piece = slice(start, start + _DECODED_ROWS)
        rows[piece] = decode(blocks[piece], stored.type.name).dequantise()
    return found


def _unchanged(values: Tensor, tensor: ModelTensor) -> Tensor:
    """Returns the values as they were before the converter changed them."""
    if tensor.change is Change.ADDED_ONE:
        return values.float() - 1
    if tensor.change is Change.INTERLEAVED:
        pairs = values.unflatten(0, (-1, tensor.head_size // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)
    return values
