"""Fuzzes GGUF files of models made by strangers."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from fuzz.refusals import refused
from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf.blocks import decode
from inference_svc.model.gguf.expand import write_folder
from inference_svc.model.gguf.file import PLAIN
from inference_svc.model.gguf.tensors import read, tensors
from inference_svc.model.quantised import read_scheme

MAX_GROWTH = 16
"""Most bytes of values for a byte of a file: of four bits in fp32, and some for scales."""
NEAR = (0, 1, 2, 3, 4, 7, 8, 12, 14, 31, 32, 33, 64, 96, 128, 256, 1 << 31, 1 << 32, (1 << 64) - 1)
_NUMBERS = count()
_ARRAY, _TEXT = 9, 8
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def fuzz_gguf(data: bytes) -> None:
    """Reads a file as a server does that has no other file of the model: it is refused, or its
    tensors are, or they have the shapes that were announced."""
    folder = _folder()
    small = folder / "small"
    for before in (*folder.glob("*.gguf"), *small.iterdir()):
        before.unlink()
    # Of another name each time: the reader remembers the last headers.
    path = folder / f"{next(_NUMBERS)}.gguf"
    path.write_bytes(data)
    with refused(UnsupportedModel):
        write_folder(path, small)
        config = json.loads((small / "config.json").read_text(encoding="utf-8"))
        scheme = read_scheme(config)
        for each in tensors(path):
            values = read(path, each.name)
            assert values.shape == each.shape
            assert values.nbytes <= MAX_GROWTH * len(data)
            if values.dtype == torch.uint8:
                assert scheme is not None
                assert each.dtype not in PLAIN
                rows = decode(values, each.dtype)
                assert rows.codes.shape == each.stored.shape


@cache
def _folder() -> Path:
    """Returns a folder of this process: to remove one takes longer than all else here."""
    folder = Path(tempfile.mkdtemp(prefix="loadout-fuzz-"))
    (folder / "small").mkdir()
    return folder


# --- changes that keep the form -----------------------------------------------------------------


class _Field(NamedTuple):
    """A number's place, by its code in `struct`, or a text's with its length in front, "s"."""

    start: int
    end: int
    code: str


def change_gguf(data: bytes, random: Random) -> bytes | None:
    """Changes one to three fields of a header, or bytes of a tensor. None: it has another form."""
    for _ in range(random.choice((1, 1, 2, 3))):
        try:
            fields = list(_fields(data))
        except (struct.error, IndexError):
            return None
        end = fields[-1].end
        if end < len(data) and random.random() < 0.1:
            at = random.randrange(end, len(data))
            data = data[:at] + random.randbytes(2) + data[at + 2 :]
            continue
        start, end, code = random.choice(fields)
        data = data[:start] + _changed(data[start:end], code, random) + data[end:]
    return data


def _changed(value: bytes, code: str, random: Random) -> bytes:
    if code == "s":
        text = value[8:]
        at = random.randrange(len(text) + 1)
        added = random.choice((b"", b" ", b"a", b".weight", b"\xe2\x96\x81", b"1", text))
        text = text[:at] + added + text[at + random.randrange(2) :]
        return struct.pack("<Q", len(text)) + text
    if code in "fd":
        return struct.pack(f"<{code}", random.choice((0.0, -1.0, 1e-5, float("inf"), float("nan"))))
    number = int.from_bytes(value, "little")
    number = random.choice((number + 1, number - 1, number * 2, random.choice(NEAR)))
    return (number % (1 << 8 * len(value))).to_bytes(len(value), "little")


def _fields(data: bytes) -> Iterator[_Field]:
    """Yields the fields of a header, in their order. Raises struct.error or IndexError where it
    ends too early."""
    num_tensors, num_pairs = struct.unpack_from("<QQ", data, 8)
    yield from (_Field(8, 16, "Q"), _Field(16, 24, "Q"))
    at = 24
    for _ in range(num_pairs):
        key = _text_at(data, at)
        [kind] = struct.unpack_from("<I", data, key.end)
        yield from (key, _Field(key.end, key.end + 4, "I"))
        at, items = key.end + 4, 1
        if kind == _ARRAY:
            kind, items = struct.unpack_from("<IQ", data, at)
            yield from (_Field(at, at + 4, "I"), _Field(at + 4, at + 12, "Q"))
            at += 12
        for _ in range(items):
            field = _value_at(data, at, kind)
            yield field
            at = field.end
    for _ in range(num_tensors):
        name = _text_at(data, at)
        [num_dims] = struct.unpack_from("<I", data, name.end)
        yield from (name, _Field(name.end, name.end + 4, "I"))
        at = name.end + 4
        for code in [*"Q" * min(num_dims, len(data)), "I", "Q"]:
            field = _Field(at, at + struct.calcsize(code), code)
            yield field
            at = field.end


def _value_at(data: bytes, at: int, kind: int) -> _Field:
    if kind == _TEXT:
        return _text_at(data, at)
    code = _CODES.get(kind)
    if code is None:
        raise IndexError(kind)
    struct.unpack_from(code, data, at)
    return _Field(at, at + struct.calcsize(code), code)


def _text_at(data: bytes, at: int) -> _Field:
    [length] = struct.unpack_from("<Q", data, at)
    if at + 8 + length > len(data):
        raise IndexError(length)
    return _Field(at, at + 8 + length, "s")
