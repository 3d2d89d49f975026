"""A file in memory reads as what was appended, and takes no more memory than that."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.checkpoint.reading.memory_files import MIN_PIECE_BYTES, MemoryFile
from adapter_store.errors import CorruptData

SIZES = st.sampled_from(
    [0, 1, 7, 1000, MIN_PIECE_BYTES - 1, MIN_PIECE_BYTES, MIN_PIECE_BYTES + 1, 3 * MIN_PIECE_BYTES]
)


@given(st.lists(SIZES, max_size=8), st.data())
def test_it_reads_as_what_was_appended_at_any_time(sizes, data) -> None:
    file, expected = MemoryFile("a"), b""
    for number, size in enumerate(sizes):
        piece = bytes([number + 1]) * size
        file.append(piece)
        expected += piece
        assert file.size_bytes == len(expected)
        start = data.draw(st.integers(0, len(expected)))
        assert file.read_at(start, len(expected) - start) == expected[start:]
    with pytest.raises(CorruptData, match="a ends at byte"):
        file.read_at(len(expected), 1)


@pytest.mark.slow
def test_cut_into_single_bytes_it_takes_what_it_holds() -> None:
    size = 3 * MIN_PIECE_BYTES
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        file = MemoryFile("a")
        for number in range(size):
            file.append(bytes([number % 256]))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert file.size_bytes == size
    assert held < 1.5 * size
