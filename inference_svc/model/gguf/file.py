"""Reads the header of a GGUF file: its metadata, and the places of its tensors.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file may be a
stranger's: every count, length, size and offset is compared with a limit, and with the size of the
file, before anything is allocated or read for it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from contract.folders import POINTER
from inference_svc.errors import UnsupportedModel

MAX_HEADER_BYTES = 64 << 20
"""More than any vocabulary has: half a million tokens and merges have 20 MB."""
MAX_PAIRS = 4096
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 20
"""The most items of an array: there are half a million merges in the largest files."""
MAX_KEY_BYTES, MAX_NAME_BYTES = 1024, 256
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
SHOWN_CHARS = 60

Value: TypeAlias = bool | int | float | str | list[Any]
"""A value of the metadata. Lists have numbers or texts, never lists."""


class ElementType(NamedTuple):
    """A type of elements: so many of them, a block, lie in so many bytes."""

    name: str
    block: int
    num_bytes: int

    def bytes_of(self, num_elements: int) -> int:
        return num_elements // self.block * self.num_bytes


TYPES: Mapping[int, ElementType] = {
    0: ElementType("F32", 1, 4),
    1: ElementType("F16", 1, 2),
    2: ElementType("Q4_0", 32, 18),
    3: ElementType("Q4_1", 32, 20),
    6: ElementType("Q5_0", 32, 22),
    7: ElementType("Q5_1", 32, 24),
    8: ElementType("Q8_0", 32, 34),
    12: ElementType("Q4_K", 256, 144),
    13: ElementType("Q5_K", 256, 176),
    14: ElementType("Q6_K", 256, 210),
    30: ElementType("BF16", 1, 2),
}
"""The types that are read, by their numbers in ggml.h (`enum ggml_type`)."""
PLAIN = ("F32", "F16", "BF16")
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4",
}  # fmt: skip
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_NUMBERS[_BOOL] = "B"
"""The codes of `struct` of numbers, by their types in GGUF."""


class StoredTensor(NamedTuple):
    """A tensor's place in the file. `shape` is in torch's order, the slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: ElementType
    start: int

    @property
    def num_bytes(self) -> int:
        return self.type.bytes_of(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a file's header; `tensors` are in the order of their bytes."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: tuple[StoredTensor, ...]

    def unsupported(self, key: str, reason: str) -> UnsupportedModel:
        """Returns an error about a key of the metadata, with its value."""
        return UnsupportedModel(f"{self.path}: {key} = {shown(self.metadata.get(key))}: {reason}")


def shown(value: object) -> str:
    """Returns a value of a file as errors show it."""
    text = repr(value[:SHOWN_CHARS] if isinstance(value, str | list) else value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def read_header(path: Path) -> Header:
    """Reads a file's header. Raises UnsupportedModel for a file that cannot be read, or is not
    whole, or has tensors of types that are not read."""
    try:
        with path.open("rb") as file:
            return parse_header(file, path.stat().st_size, path)
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error


def parse_header(file: BinaryIO, file_bytes: int, path: Path) -> Header:
    """Reads the header of a file of this size from its beginning; `path` is for errors. Raises as
    `read_header`."""
    reader = _Reader(file, file_bytes, path)
    reader.check_magic()
    num_tensors = reader.count("tensor count", MAX_TENSORS)
    num_pairs = reader.count("metadata count", MAX_PAIRS)
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = reader.text("a key", MAX_KEY_BYTES)
        if key in metadata:
            raise reader.fail(f"the key {shown(key)} is there twice")
        metadata[key] = reader.value(key)
    alignment = _alignment(reader, metadata)
    tensors = [reader.tensor(alignment) for _ in range(num_tensors)]
    data_start = -(-reader.position // alignment) * alignment
    placed = [each._replace(start=data_start + each.start) for each in tensors]
    placed.sort(key=lambda each: each.start)
    _check_places(reader, placed, file_bytes)
    return Header(path, metadata, tuple(placed))


def _alignment(reader: _Reader, metadata: Mapping[str, Value]) -> int:
    found = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(found) is not int or not 8 <= found <= MAX_ALIGNMENT or found & (found - 1):
        reason = f"must be a power of two from 8 to {MAX_ALIGNMENT}"
        raise reader.fail(f"{_ALIGNMENT} = {shown(found)}: {reason}")
    return found


def _check_places(reader: _Reader, tensors: list[StoredTensor], file_bytes: int) -> None:
    """Raises UnsupportedModel for tensors that overlap, or do not end within the file."""
    names: set[str] = set()
    end, before = 0, ""
    for each in tensors:
        if each.name in names:
            raise reader.fail(f"the tensor {shown(each.name)} is there twice")
        names.add(each.name)
        if each.start < end:
            raise reader.fail(f"the tensors {shown(before)} and {shown(each.name)} overlap")
        end, before = each.start + each.num_bytes, each.name
        if end > file_bytes:
            raise reader.fail(
                f"the tensor {shown(each.name)} ends at byte {end}, but the file has {file_bytes}: "
                "it is incomplete, copy or download it again"
            )


class _Reader:
    """Reads a header's parts in their order."""

    def __init__(self, file: BinaryIO, file_bytes: int, path: Path) -> None:
        self._file, self._path = file, path
        self._end = min(file_bytes, MAX_HEADER_BYTES)
        self._items_left = 4 * MAX_ITEMS
        self.position = 0

    def fail(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path}: {reason}")

    def check_magic(self) -> None:
        start = self._take(8, "the first bytes")
        version = int.from_bytes(start[4:], "little")
        if POINTER.startswith(start):
            raise self.fail("a pointer of Git LFS in place of the file: run git lfs pull there")
        if start[:4] != _MAGIC:
            raise self.fail(f"not a GGUF file: it begins with {start[:4]!r}")
        if version not in _VERSIONS and version & 0xFFFF == 0:
            raise self.fail("the file is big-endian; only little-endian ones are read")
        if version not in _VERSIONS:
            raise self.fail(f"GGUF of version {version}; versions 2 and 3 are read")

    def count(self, what: str, limit: int) -> int:
        """Reads a number of 64 bits that counts something."""
        found = int.from_bytes(self._take(8, what), "little")
        if found > limit:
            raise self.fail(f"{what} = {found}: at most {limit} are read")
        return found

    def text(self, what: str, limit: int) -> str:
        num_bytes = int.from_bytes(self._take(8, what), "little")
        if num_bytes > limit:
            raise self.fail(f"{what} has {num_bytes} bytes: at most {limit} are read")
        try:
            return self._take(num_bytes, what).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def value(self, key: str) -> Value:
        what = shown(key)
        kind = self._uint32(what)
        return self._items(what) if kind == _ARRAY else self._scalars(kind, 1, what)[0]

    def tensor(self, alignment: int) -> StoredTensor:
        """Reads a tensor's place; its start is from the beginning of all tensors' bytes."""
        name = self.text("a tensor's name", MAX_NAME_BYTES)
        what = f"the tensor {shown(name)}"
        num_dims = self._uint32(what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"{what} has {num_dims} dimensions: 1 to {MAX_DIMS} are read")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, what))
        number = self._uint32(what)
        start = int.from_bytes(self._take(8, what), "little")
        if number not in TYPES:
            found = _OTHER_TYPES.get(number, number)
            raise self.fail(
                f"{what} has the type {found}; supported are "
                f"{', '.join(each.name for each in TYPES.values())}: serve a file of these "
                "types, such as Q4_K_M"
            )
        stored = TYPES[number]
        if not all(dims) or dims[0] % stored.block:
            reason = f"must have rows of whole blocks of {stored.block}"
            raise self.fail(f"{what} has dimensions {list(dims)}, but {stored.name} {reason}")
        if start % alignment:
            raise self.fail(f"{what} starts at byte {start}, which is no multiple of {alignment}")
        return StoredTensor(name, tuple(reversed(dims)), stored, start)

    def _items(self, what: str) -> list[Any]:
        kind = self._uint32(what)
        count = self.count(f"items of {what}", min(MAX_ITEMS, self._items_left))
        self._items_left -= count
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no known key has")
        return self._scalars(kind, count, what)

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        if kind == _TEXT:
            return [self.text(what, self._end) for _ in range(count)]
        code = _NUMBERS.get(kind)
        if code is None:
            raise self.fail(f"{what} has a value of the type {kind}, which GGUF does not have")
        found = struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code), what))
        if kind != _BOOL:
            return list(found)
        if any(each > 1 for each in found):
            raise self.fail(f"{what} has a truth value that is neither 0 nor 1")
        return [bool(each) for each in found]

    def _uint32(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little")

    def _take(self, num_bytes: int, what: str) -> bytes:
        """Reads bytes of the header, if that many can be there."""
        if num_bytes > self._end - self.position:
            limit = f", or its header has more than {MAX_HEADER_BYTES >> 20} MiB"
            raise self.fail(f"{what} ends after the file{limit}: it is damaged, download it again")
        found = self._file.read(num_bytes)
        if len(found) < num_bytes:
            raise self.fail("the file has become shorter")
        self.position += num_bytes
        return found
