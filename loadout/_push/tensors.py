"""Tensors of torch and numpy as the bytes of a .safetensors file, one tensor at a time.

Neither library is imported here, because a caller with a tensor has imported its library. The bytes
equal the result of `safetensors.torch.save`, but are never in memory all at once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadout.errors import InvalidArgument

DTYPES = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
"""The types that adapters are saved in, in the order in which safetensors writes them: its names
and the bytes of a value."""
_ORDER = list(DTYPES)
_ALIGNMENT = 8

Read = Callable[[Any], memoryview]
"""Returns the raw bytes of a tensor, row-major, in host memory."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be sent: its name in the file, its dtype by torch's name, its shape, and the
    object that has its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Any

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def describe(name: str, values: Any) -> Tensor:
    """Returns the description of a tensor. Raises InvalidArgument if its values cannot be sent."""
    if is_torch(values):
        _check_torch(name, values)
        dtype = str(values.dtype).removeprefix("torch.")
    elif is_numpy(values):
        dtype = values.dtype.name
        if not values.dtype.isnative or sys.byteorder != "little":
            raise invalid(name, f"its dtype {values.dtype} is not little-endian")
    else:
        raise invalid(name, f"is a {type(values).__name__}, not a tensor of torch or numpy")
    if dtype not in DTYPES:
        raise invalid(name, f"has dtype {dtype}; convert it to one of {', '.join(DTYPES)}")
    return Tensor(name, dtype, tuple(int(size) for size in values.shape), values)


def is_torch(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def is_numpy(values: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(values, numpy.ndarray)


def is_sharded(values: Any) -> bool:
    """Returns whether this is a DTensor, of which each rank has a part."""
    return is_torch(values) and hasattr(values, "full_tensor") and hasattr(values, "placements")


def read(values: Any) -> memoryview:
    """Returns the raw bytes of a tensor; a copy if it is on a device or not contiguous."""
    if is_torch(values):
        torch = sys.modules["torch"]
        host = values.detach().to("cpu").contiguous()
        return memoryview(host.reshape(-1).view(torch.uint8).numpy())
    numpy = sys.modules["numpy"]
    flat: Any = numpy.ascontiguousarray(values).reshape(-1)
    return memoryview(flat.view(numpy.uint8))


def in_order(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors as they lie in the file: the widest types first, then by name."""
    return sorted(tensors, key=lambda each: (_ORDER.index(each.dtype), each.name.encode()))


def header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes of the file before the data of these tensors, which are in order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def pieces(
    tensors: Sequence[Tensor], metadata: Mapping[str, str], num_bytes: int, read: Read = read
) -> Iterator[bytes]:
    """Yields the file in pieces of `num_bytes`; the last may be smaller. One tensor is read at a
    time, when its first byte is due."""
    pending = bytearray(header(tensors, metadata))
    while len(pending) >= num_bytes:
        yield bytes(pending[:num_bytes])
        del pending[:num_bytes]
    for tensor in tensors:
        data = read(tensor.values)
        start = 0
        while start < len(data):
            if not pending and len(data) - start >= num_bytes:
                yield bytes(data[start : start + num_bytes])
                start += num_bytes
                continue
            end = min(len(data), start + num_bytes - len(pending))
            pending += data[start:end]
            start = end
            if len(pending) >= num_bytes:
                yield bytes(pending)
                pending.clear()
    if pending:
        yield bytes(pending)


def invalid(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"tensors: {name} {why}", code="INVALID_ARGUMENT", subject=name)


def _check_torch(name: str, values: Any) -> None:
    if values.device.type == "meta":
        raise invalid(name, "is on the device meta, which has no values")
    if values.layout != sys.modules["torch"].strided:
        raise invalid(name, f"has the layout {values.layout}; make it dense")
    if type(values).__name__ in ("ShardedTensor", "FlatParameter"):
        raise invalid(
            name,
            f"is a {type(values).__name__}, a part of a tensor: gather it, or shard with DTensor "
            "(FSDP2)",
        )
