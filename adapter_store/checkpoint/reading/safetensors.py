"""The header of a .safetensors file, read as hostile: cap, check, then allocate.

Format (github.com/huggingface/safetensors): 8 bytes little-endian header length N, N bytes of a
JSON object {name: {dtype, shape, data_offsets: [start, end)}}, optionally padded with spaces, then
the data. Offsets count from the end of the header; tensors cover the data without gap or overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from adapter_store.checkpoint.reading.json import parse_object, show
from adapter_store.errors import InvalidAdapter
from contract.images.dtypes import DataType

LENGTH_BYTES = 8
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 8
MAX_DIMENSION = 2**48
_MAX_COMMAS = 2 * MAX_DIMENSIONS
"""Per tensor: between its fields, in its shape and offsets, and some for the metadata."""

_METADATA = "__metadata__"
_DTYPES = {dtype.value: dtype for dtype in DataType if dtype is not DataType.INT32}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies: bytes [offset, offset + length_bytes) of `file`, row-major."""

    key: str
    file: str
    dtype: DataType
    shape: tuple[int, ...]
    offset: int
    length_bytes: int


class Scanned(NamedTuple):
    """The findings of `scan` about a tensor: the sha256 of its raw bytes, and a magnitude that none
    of its values exceeds."""

    sha256: bytes
    largest: float


class Stored(Protocol):
    """Bytes of one type in a file."""

    @property
    def file(self) -> str: ...
    @property
    def dtype(self) -> DataType: ...
    @property
    def offset(self) -> int: ...
    @property
    def length_bytes(self) -> int: ...


StoredT = TypeVar("StoredT", bound=Stored)


def group_adjacent(items: Iterable[StoredT], max_bytes: int) -> list[list[StoredT]]:
    """Groups neighbours in a file, of one type, into runs of at most `max_bytes`, so that small
    items cost a call per run, not each. A larger item is a run of its own."""
    runs: list[list[StoredT]] = []
    length = 0
    last: StoredT | None = None
    for item in sorted(items, key=lambda item: (item.file, item.offset)):
        length += item.length_bytes
        if (
            last is None
            or (last.file, last.dtype) != (item.file, item.dtype)
            or last.offset + last.length_bytes != item.offset
            or length > max_bytes
        ):
            runs.append([])
            length = item.length_bytes
        runs[-1].append(item)
        last = item
    return runs


def read_header(
    read_at: Callable[[int, int], bytes],
    file_bytes: int,
    file: str,
    *,
    max_header_bytes: int,
    max_tensors: int,
) -> tuple[TensorRecord, ...]:
    """Reads and checks the header of `file`; returns its tensors in order of offset.

    `read_at(offset, length)` returns exactly `length` bytes of the file, which has `file_bytes`;
    never more than `max_header_bytes` are read at once.

    Raises:
        InvalidAdapter: with one reason per rule; see the raises below.
    """
    if file_bytes < LENGTH_BYTES:
        raise _invalid(file, "FILE_TOO_SHORT", f"{file_bytes} bytes cannot hold a header")
    header_bytes = int.from_bytes(read_at(0, LENGTH_BYTES), "little")
    if header_bytes > max_header_bytes:
        raise _invalid(
            file,
            "HEADER_TOO_LARGE",
            f"header of {header_bytes} bytes is over the limit of {max_header_bytes}",
        )
    data_start = LENGTH_BYTES + header_bytes
    if data_start > file_bytes:
        raise _invalid(
            file,
            "HEADER_TRUNCATED",
            f"header of {header_bytes} bytes in a file of {file_bytes}",
        )
    header = read_at(LENGTH_BYTES, header_bytes)
    records = parse_header(header, data_start, file, max_tensors=max_tensors)
    _check_coverage(records, data_start, file_bytes, file)
    return records


def parse_header(
    header: bytes, data_start: int, file: str, *, max_tensors: int
) -> tuple[TensorRecord, ...]:
    """Returns the tensors of a header, which is complete, in order of offset; whether they cover
    the data is not checked. Raises InvalidAdapter, as `read_header`."""
    # Before parsing: a parsed value takes many times the memory of its bracket or comma.
    if (
        header.count(b"{") > max_tensors + 2
        or header.count(b"[") > 2 * max_tensors
        or header.count(b",") > _MAX_COMMAS * max_tensors
    ):
        raise _invalid(file, "TOO_MANY_TENSORS", f"more than {max_tensors} tensors")
    if not header.startswith(b"{"):
        raise _invalid(file, "HEADER_START_INVALID", "the header does not start with '{'")
    fields = parse_object(header, file)
    _check_metadata(fields.pop(_METADATA, {}), file)
    if len(fields) > max_tensors:
        raise _invalid(file, "TOO_MANY_TENSORS", f"more than {max_tensors} tensors")
    found = (_tensor_record(name, info, data_start, file) for name, info in fields.items())
    return tuple(sorted(found, key=lambda record: (record.offset, record.length_bytes)))


def encode_header(tensors: Iterable[tuple[str, DataType, tuple[int, ...]]]) -> bytes:
    """Returns the header of a file that has the data of these tensors, of a name, type and shape
    each, after it in this order."""
    fields: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for key, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields[key] = {"dtype": dtype.value, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // LENGTH_BYTES) * LENGTH_BYTES)  # the data begins aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _check_metadata(metadata: Any, file: str) -> None:
    if metadata is None:  # as MLX writes none
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _invalid(file, "METADATA_INVALID", f"{_METADATA} is not a map of strings")


def _tensor_record(key: str, info: Any, data_start: int, file: str) -> TensorRecord:
    # isprintable() is false for lone surrogates too, which could not be encoded in an answer.
    if not 0 < len(key) <= MAX_NAME_CHARS or not key.isprintable():
        raise _invalid(file, "TENSOR_NAME_INVALID", f"tensor name {show(key)}")
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid(
            key, "TENSOR_INFO_INVALID", "needs exactly dtype, shape and data_offsets", file
        )
    dtype = _DTYPES.get(info["dtype"]) if isinstance(info["dtype"], str) else None
    if dtype is None:
        raise _invalid(
            key,
            "DTYPE_UNSUPPORTED",
            f"dtype {show(info['dtype'])} is not one of {', '.join(_DTYPES)}",
            file,
        )
    shape = _shape(key, info["shape"], file)
    start, end = _offsets(key, info["data_offsets"], file)
    expected_bytes = math.prod(shape) * dtype.itemsize
    if end - start != expected_bytes:
        raise _invalid(
            key,
            "LENGTH_MISMATCH",
            f"{dtype.value}{list(shape)} needs {expected_bytes} bytes, "
            f"data_offsets span {end - start}",
            file,
        )
    return TensorRecord(key, file, dtype, shape, data_start + start, end - start)


def _shape(name: str, value: Any, file: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise _invalid(name, "SHAPE_INVALID", f"shape {show(value)}", file)
    if not all(type(size) is int and 0 <= size <= MAX_DIMENSION for size in value):
        raise _invalid(name, "SHAPE_INVALID", f"shape {show(value)}", file)
    if 0 in value:
        raise _invalid(
            name,
            "TENSOR_EMPTY",
            f"shape {value} has no elements (saved without gathering a sharded model?)",
            file,
        )
    return tuple(value)


def _offsets(name: str, value: Any, file: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise _invalid(name, "OFFSETS_INVALID", f"data_offsets {show(value)}", file)
    if not all(type(offset) is int and offset >= 0 for offset in value):
        raise _invalid(name, "OFFSETS_INVALID", f"data_offsets {show(value)}", file)
    start, end = value
    if end < start:
        raise _invalid(name, "OFFSETS_REVERSED", f"data_offsets {value}", file)
    return start, end


def _check_coverage(
    records: Sequence[TensorRecord], data_start: int, file_bytes: int, file: str
) -> None:
    """Tensors cover the data exactly: every byte belongs to one tensor."""
    position = data_start
    for record in records:
        end = record.offset + record.length_bytes
        if end > file_bytes:
            raise _invalid(
                record.key,
                "TENSOR_OUT_OF_FILE",
                f"ends at byte {end} of a file of {file_bytes} (truncated?)",
                file,
            )
        if record.offset < position:
            raise _invalid(record.key, "TENSORS_OVERLAP", "overlaps the tensor before it", file)
        if record.offset > position:
            raise _invalid(
                record.key,
                "DATA_GAP",
                f"{record.offset - position} bytes before it are unused",
                file,
            )
        position = end
    if position != file_bytes:
        raise _invalid(
            file, "TRAILING_BYTES", f"{file_bytes - position} bytes after the last tensor"
        )


def _invalid(subject: str, reason: str, detail: str, file: str = "") -> InvalidAdapter:
    where = f"{file}: {subject}" if file else subject
    return InvalidAdapter(f"{where}: {detail}", subject=subject, reason=reason)
