"""Writes checkpoints, and reads the model if the library of this name is not installed; then this
module has all that `model.checkpoint.weights` calls.

The format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class SafetensorError(Exception):
    """A file is not in the safetensors format."""


class Slice(NamedTuple):
    """A tensor of a file, read only on request."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class File:
    """An open file. Its header is trusted, because the pack's maker wrote it."""

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 + length:
            raise SafetensorError("the header is longer than the file")
        header = json.loads(data[8 : 8 + length])
        self._data = memoryview(data)[8 + length :]
        self._slices = {
            name: Slice(tuple(each["shape"]), each["dtype"], *each["data_offsets"])
            for name, each in header.items()
            if name != "__metadata__"
        }

    def offset_keys(self) -> list[str]:
        return sorted(self._slices, key=lambda name: self._slices[name].start)

    def get_slice(self, name: str) -> Slice:
        return self._slices[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        shape, dtype, start, end = self._slices[name]
        flat = torch.frombuffer(bytearray(self._data[start:end]), dtype=DTYPES[dtype])
        assert len(flat) == math.prod(shape)
        return flat.view(shape)


@contextmanager
def safe_open(path: Path, framework: str) -> Iterator[File]:
    """Opens a file. Raises SafetensorError for another format, and OSError if it is unreadable."""
    assert framework == "pt"
    yield File(Path(path).read_bytes())


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors of a CPU's memory to a file."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape = [*tensor.shape]
        header[key] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def install_if_missing() -> bool:
    """Replaces the library if it is not installed, and returns whether it does."""
    if "safetensors" in sys.modules or importlib.util.find_spec("safetensors") is not None:
        return False
    module: Any = ModuleType("safetensors")
    module.safe_open, module.SafetensorError = safe_open, SafetensorError
    sys.modules["safetensors"] = module
    return True
