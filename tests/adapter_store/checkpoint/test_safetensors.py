"""One test per rule of the format, then anything at all: only InvalidAdapter comes out."""

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from adapter_store.checkpoint.reading.safetensors import TensorRecord, read_header
from adapter_store.errors import InvalidAdapter
from contract.images.dtypes import DataType
from tests.support.examples import examples

FILE = "adapter_model.safetensors"


def parse(
    data: bytes, max_header_bytes: int = 1 << 16, max_tensors: int = 100
) -> tuple[TensorRecord, ...]:
    def read_at(offset: int, length: int) -> bytes:
        assert offset >= 0
        assert offset + length <= len(data), "read beyond the file"
        assert length <= max(max_header_bytes, 8), "read more than the cap"
        return data[offset : offset + length]

    return read_header(
        read_at, len(data), FILE, max_header_bytes=max_header_bytes, max_tensors=max_tensors
    )


def container(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: Any = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_reads_what_safetensors_writes():
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(5, dtype=torch.bfloat16),
        "c": torch.zeros(1, 1, dtype=torch.float16),
    }
    data = save(tensors, metadata={"format": "pt"})
    entries = {entry.key: entry for entry in parse(data)}
    assert {name: e.shape for name, e in entries.items()} == {"a": (2, 3), "b": (5,), "c": (1, 1)}
    assert entries["b"].dtype is DataType.BFLOAT16
    assert max(e.offset + e.length_bytes for e in entries.values()) == len(data)


def test_scalar_and_space_padding_are_fine():
    header = json.dumps({"x": tensor(shape=(), end=4)}).encode() + b"   "
    (entry,) = parse(container(header, bytes(4)))
    assert entry == TensorRecord("x", FILE, DataType.FLOAT32, (), 8 + len(header), 4)


def test_no_metadata_as_mlx_writes_it():
    header = json.dumps({"__metadata__": None, "x": tensor()}).encode()
    (entry,) = parse(container(header, bytes(8)))
    assert entry.shape == (2,)


HUGE = 2**62
BAD_FILES = {
    "FILE_TOO_SHORT": b"\x00" * 7,
    "HEADER_TOO_LARGE": struct.pack("<Q", 1 << 40) + b"{}",
    "HEADER_TRUNCATED": struct.pack("<Q", 100) + b"{}",
    "HEADER_START_INVALID": container(b' {"x": 1}'),
    "NOT_UTF8": container(b'{"\xff": 1}'),
    "NOT_JSON": container(b'{"x": '),
    "NOT_JSON (NaN)": container(b'{"x": NaN}'),
    "NOT_JSON (digits)": container(b'{"x": ' + b"9" * 5000 + b"}"),
    "DUPLICATE_KEY": container(b'{"x": 1, "x": 2}'),
    "TOO_MANY_TENSORS": container({str(i): 0 for i in range(101)}),
    "TOO_MANY_TENSORS (brackets)": container(b"{" * 200),
    "TOO_MANY_TENSORS (commas)": container(b'{"x": [' + b"0," * 2000 + b"0]}"),
    "METADATA_INVALID": container({"__metadata__": {"a": 1}}),
    "METADATA_INVALID (list)": container({"__metadata__": []}),
    "TENSOR_NAME_INVALID": container({"": tensor()}, bytes(8)),
    "TENSOR_NAME_INVALID (surrogate)": container(b'{"\\ud800": 1}'),
    "TENSOR_NAME_INVALID (long)": container({"x" * 513: tensor()}, bytes(8)),
    "TENSOR_INFO_INVALID": container({"x": 3}),
    "TENSOR_INFO_INVALID (extra)": container({"x": {**tensor(), "more": 1}}, bytes(8)),
    "DTYPE_UNSUPPORTED": container({"x": tensor(dtype="I64", shape=(1,))}, bytes(8)),
    "DTYPE_UNSUPPORTED (unhashable)": container({"x": tensor(dtype=[])}, bytes(8)),
    "SHAPE_INVALID": container({"x": tensor(shape=(-2,))}, bytes(8)),
    "SHAPE_INVALID (bool)": container({"x": tensor(shape=(True, 2))}, bytes(8)),
    "SHAPE_INVALID (huge)": container({"x": tensor(shape=(HUGE, HUGE))}, bytes(8)),
    "SHAPE_INVALID (dimensions)": container({"x": tensor(shape=(1,) * 9)}, bytes(4)),
    "TENSOR_EMPTY": container({"x": tensor(shape=(2, 0), end=0)}),
    "OFFSETS_INVALID": container({"x": tensor(start=-8, end=0)}, bytes(8)),
    "OFFSETS_INVALID (float)": container({"x": tensor(end=8.0)}, bytes(8)),
    "OFFSETS_INVALID (three)": container(
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, bytes(8)
    ),
    "OFFSETS_REVERSED": container({"x": tensor(start=8, end=0)}, bytes(8)),
    "LENGTH_MISMATCH": container({"x": tensor(shape=(3,))}, bytes(8)),
    "LENGTH_MISMATCH (overflow)": container({"x": tensor(shape=(2**40, 2**40))}, bytes(8)),
    "TENSOR_OUT_OF_FILE": container({"x": tensor()}, bytes(7)),
    "TENSORS_OVERLAP": container({"x": tensor(), "y": tensor(start=4, end=12)}, bytes(12)),
    "TENSORS_OVERLAP (same)": container({"x": tensor(), "y": tensor()}, bytes(8)),
    "DATA_GAP": container({"x": tensor(start=1, end=9)}, bytes(9)),
    "TRAILING_BYTES": container({"x": tensor()}, bytes(9)),
    "TRAILING_BYTES (no tensor)": container({}, bytes(1)),
}


@pytest.mark.parametrize("rule", BAD_FILES)
def test_broken_file_is_refused_by_its_rule(rule):
    with pytest.raises(InvalidAdapter) as error:
        parse(BAD_FILES[rule])
    assert error.value.reason == rule.split(" ")[0]
    assert error.value.subject in (FILE, "x", "y")


def test_deep_nesting_is_refused():
    with pytest.raises(InvalidAdapter) as error:
        parse(container(b'{"x":' + b"[" * 50_000), max_tensors=30_000)
    assert error.value.reason == "NESTED_TOO_DEEPLY"


def test_culprit_is_named():
    with pytest.raises(InvalidAdapter, match=r"x: ends at byte .*truncated") as error:
        parse(BAD_FILES["TENSOR_OUT_OF_FILE"])
    assert error.value.subject == "x"


def accepts_only_sound_files(data: bytes) -> None:
    try:
        entries = parse(data)
    except InvalidAdapter:
        return
    position = 8 + int.from_bytes(data[:8], "little")
    for entry in entries:
        assert entry.offset == position
        position += entry.length_bytes
    assert position == len(data)


@given(st.binary(max_size=400))
def test_random_bytes(data):
    accepts_only_sound_files(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
infos = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "U8", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=6), infos | json_values, max_size=4), st.integers(0, 64))
def test_random_headers(header, num_bytes):
    accepts_only_sound_files(container(header, bytes(num_bytes)))


VALID = save({"a.b": torch.zeros(2, 3), "c": torch.zeros(4, dtype=torch.bfloat16)})


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4
    ),
    st.integers(0, len(VALID)),
)
def test_mutated_file(changes, length):
    data = bytearray(VALID)
    for position, value in changes:
        data[position] = value
    accepts_only_sound_files(bytes(data))
    accepts_only_sound_files(bytes(data[:length]))
