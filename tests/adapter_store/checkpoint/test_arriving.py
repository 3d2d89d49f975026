"""Tensors that are hashed while they arrive: as if their file were read afterwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from adapter_store.checkpoint.reading.arriving import ArrivingTensors
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.checkpoint.reading.safetensors import read_header
from adapter_store.checkpoint.reading.scan import scan_tensors
from adapter_store.errors import CorruptData
from tests.support.examples import examples

NAME = "adapter_model.safetensors"
TENSORS = {
    "a": torch.arange(7, dtype=torch.float32),
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "c": torch.arange(5, dtype=torch.float16),
    "d": torch.arange(3).to(torch.float8_e4m3fn),
    "e": torch.full((2, 2), 3e38),  # whose sum is infinite, though no value is
}


def arrive(data: bytes, sizes: list[int]) -> tuple[MemoryFile, ArrivingTensors]:
    file = MemoryFile(NAME)
    arriving = ArrivingTensors(file)
    position = 0
    for size in [*sizes, len(data)]:
        piece = data[position : position + size]
        position += size
        file.append(piece)
        arriving.advance(piece)
    return file, arriving


def records_of(data: bytes):
    def read_at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    return read_header(read_at, len(data), NAME, max_header_bytes=1 << 20, max_tensors=100)


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 200), max_size=40))
def test_hashes_are_those_of_the_file_however_it_is_cut(tmp_path_factory, sizes) -> None:
    data = save(TENSORS)
    file, arriving = arrive(data, sizes)
    records = records_of(data)
    folder = tmp_path_factory.mktemp("file")
    save_file(TENSORS, folder / NAME)
    assert arriving.scanned(records) == scan_tensors(folder, records)
    assert MemoryFolder([file]).get(NAME) is file
    assert file.read_at(0, len(data)) == data


@given(st.sampled_from(["a", "b", "c", "d"]), st.lists(st.integers(1, 60), max_size=30))
def test_what_is_not_finite_is_left_to_the_reader(key, sizes) -> None:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    tensors[key].view(-1)[-1] = float("nan")
    data = save(tensors)
    assert arrive(data, sizes)[1].scanned(records_of(data)) is None


@given(st.integers(0, 400), st.lists(st.integers(1, 60), max_size=30))
def test_what_is_not_whole_is_left_to_the_reader(length, sizes) -> None:
    data = save(TENSORS)
    cut = data[: min(length, len(data) - 1)]
    assert arrive(cut, sizes)[1].scanned(records_of(data)) is None


def test_bytes_behind_the_last_tensor_are_left_to_the_reader() -> None:
    data = save(TENSORS)
    assert arrive(data + b"x", [len(data)])[1].scanned(records_of(data)) is None


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 90), st.integers(0, 90))
def test_a_file_in_pieces_reads_as_one(pieces, offset, length) -> None:
    file = MemoryFile(NAME)
    for piece in pieces:
        file.append(piece)
    whole = b"".join(pieces)
    if offset + length <= len(whole):
        assert file.read_at(offset, length) == whole[offset : offset + length]
    else:
        with pytest.raises(CorruptData):
            file.read_at(offset, length)
