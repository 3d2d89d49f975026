"""Headers of GGUF files: the package `gguf` reads the same, and broken ones are refused by name."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf import file as gguf_file
from inference_svc.model.gguf.file import Header, parse_header, read_header
from tests.support.examples import examples

NOWHERE = Path("model.gguf")


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", dims: tuple[int, ...] = (32,), kind: int = 0, start: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, start)


def whole(*parts: bytes, tensors: int = 0, data: int = 0, version: int = 3) -> bytes:
    """A file of these pairs, the last of them tensors, and bytes of data after alignment."""
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, len(parts) - tensors) + b"".join(parts)
    return head + bytes(-len(head) % 32 + data)


def parse(data: bytes) -> Header:
    return parse_header(io.BytesIO(data), len(data), NOWHERE)


def test_a_file_is_read_as_gguf_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    values: dict[str, Any] = {"i8": -5, "u16": 65535, "i64": -(1 << 40), "u64": 1 << 63}
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 65535)
    writer.add_int64("i64", -(1 << 40))
    writer.add_uint64("u64", 1 << 63)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 北京")
    writer.add_array("texts", ["a", "", "😀"])
    writer.add_array("numbers", [1, -2, 3])
    values |= {"f64": 0.1, "yes": True, "text": "naïve 北京"}
    values |= {"texts": ["a", "", "😀"], "numbers": [1, -2, 3]}
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", np.zeros((3, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType(2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert {key: header.metadata[key] for key in values} == values
    expected = gguf.GGUFReader(path)
    for ours, theirs in zip(header.tensors, expected.tensors, strict=True):
        assert (ours.name, ours.start) == (theirs.name, theirs.data_offset)
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.type.name, ours.num_bytes) == (theirs.tensor_type.name, theirs.n_bytes)


HUGE = 1 << 63
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the first bytes ends after the file"),
    "other": (b"\x93NUMPY\0\0" * 4, "not a GGUF file: it begins with"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "version": (whole(version=1), "GGUF of version 1; versions 2 and 3 are read"),
    "big-endian": (whole(version=3 << 24), "big-endian"),
    "tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
        "tensor count = 9223372036854775808: at most 65536",
    ),
    "pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata count = 9223372036854775808"),
    "key": (whole(struct.pack("<Q", HUGE)), "a key has 9223372036854775808 bytes: at most 1024"),
    "not-utf8": (whole(pair("k", 8, text(b"\xff"))), "'k' is not UTF-8"),
    "text": (whole(pair("k", 8, struct.pack("<Q", 10_000) + b"a")), "'k' has 10000 bytes"),
    "kind": (whole(pair("k", 13, b"")), "'k' has a value of the type 13"),
    "bool": (whole(pair("k", 7, b"\x02")), "'k' has a truth value that is neither 0 nor 1"),
    "items": (whole(pair("k", 9, struct.pack("<IQ", 0, HUGE))), "items of 'k' = 92233"),
    "short": (whole(pair("k", 9, struct.pack("<IQ", 12, 1 << 20))), "'k' ends after the file"),
    "nested": (whole(pair("k", 9, struct.pack("<IQ", 9, 1))), "'k' is an array of arrays"),
    "twice": (whole(pair("k", 0, b"\1"), pair("k", 0, b"\1")), "the key 'k' is there twice"),
    "alignment": (
        whole(pair("general.alignment", 4, struct.pack("<I", 24))),
        r"general.alignment = 24: must be a power of two from 8 to 65536",
    ),
    "no-dims": (whole(tensor(dims=()), tensors=1), "the tensor 'a' has 0 dimensions"),
    "dims": (whole(tensor(dims=(1,) * 5), tensors=1), "the tensor 'a' has 5 dimensions"),
    "zero": (whole(tensor(dims=(32, 0)), tensors=1), r"dimensions \[32, 0\], but F32"),
    "blocks": (whole(tensor(dims=(33,), kind=2), tensors=1), "Q4_0 must have rows of whole blocks"),
    "type": (whole(tensor(kind=23), tensors=1), "the type IQ4_XS; supported are F32"),
    "new-type": (whole(tensor(kind=99), tensors=1), "the type 99; supported are"),
    "start": (whole(tensor(start=8), tensors=1, data=136), "byte 8, which is no multiple of 32"),
    "cut": (whole(tensor(), tensors=1, data=127), "'a' ends at byte .* but the file has"),
    "far": (whole(tensor(start=HUGE), tensors=1, data=128), "'a' ends at byte"),
    "large": (whole(tensor(dims=(1 << 40,) * 4), tensors=1, data=128), "'a' ends at byte"),
    "same": (
        whole(tensor(), tensor(start=128), tensors=2, data=256),
        "the tensor 'a' is there twice",
    ),
    "overlap": (
        whole(tensor(), tensor("b", start=96), tensors=2, data=224),
        "the tensors 'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name: str) -> None:
    data, message = BROKEN[name]
    with pytest.raises(UnsupportedModel, match=message):
        parse(data)


def test_many_arrays_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_ITEMS", 4)
    items = struct.pack("<IQ", 0, 4) + bytes(4)
    pairs = [pair(f"k{number}", 9, items) for number in range(5)]
    assert len(parse(whole(*pairs[:4])).metadata) == 4
    with pytest.raises(UnsupportedModel, match="items of 'k4' = 4: at most 0"):
        parse(whole(*pairs))


def test_a_header_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(UnsupportedModel, match="'k' has 200 bytes: at most 100"):
        parse(whole(pair("k", 8, text("x" * 200))))
    with pytest.raises(UnsupportedModel, match="ends after the file, or its header has more than"):
        parse(whole(*(pair(f"k{number}", 8, text("x" * 30)) for number in range(4))))


def good() -> bytes:
    """A file with every kind of value, and tensors of several types."""
    sizes = {0: 1, 4: 4, 6: 4, 7: 1, 12: 8}
    numbers = [pair(f"n{kind}", kind, bytes(size)) for kind, size in sizes.items()]
    lists = [pair("l", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc"))]
    tensors = [tensor("x", (64, 2), 8), tensor("y", (256,), 14, 160), tensor("z", (3, 4), 1, 384)]
    return whole(*numbers, *lists, *tensors, tensors=3, data=408)


def test_a_good_file_is_read() -> None:
    header = parse(good())
    assert [(each.name, each.shape) for each in header.tensors] == [
        *(("x", (2, 64)), ("y", (256,)), ("z", (4, 3))),
    ]


@settings(max_examples=examples(300))
@given(st.integers(0, len(good()) - 1), st.integers(0, 255), st.booleans())
def test_a_changed_byte_is_refused_or_read(place: int, byte: int, cuts: bool) -> None:
    """Whatever is read lies in the file, and apart from everything else."""
    data = bytearray(good())
    data[place] = byte
    changed = bytes(data[: place + 1]) if cuts else bytes(data)
    try:
        header = parse(changed)
    except UnsupportedModel:
        return
    end = 0
    for each in header.tensors:
        assert each.start >= end
        end = each.start + each.num_bytes
    assert end <= len(changed)


def test_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    short = pytest.raises(UnsupportedModel, match="the file has become shorter")
    with path.open("rb") as file, short:
        parse_header(file, 100, path)
    with pytest.raises(UnsupportedModel, match=r"cannot be read: .*No such file"):
        read_header(tmp_path / "none.gguf")
