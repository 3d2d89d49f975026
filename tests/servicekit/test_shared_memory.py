"""Memory that processes share: nobody can cut it, or change sealed bytes, and it is let go of."""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import pickle
import sys
from pathlib import Path

import pytest

from servicekit.shared_memory import Mapped, SharedBytes, SharedMemory
from tests.support.machine.open_files import open_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others cannot seal a file")

NAME = "loadout-test"
DATA = bytes(range(251)) * 10_000


def num_uses() -> int:
    """The files and mappings of the name that this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count(NAME)
    return maps + sum(NAME in each for each in open_files())


def received(made: SharedBytes) -> SharedBytes:
    found: SharedBytes = pickle.loads(pickle.dumps(made))
    found.receive(os.dup(made.file), Mapped())
    return found


def test_the_one_writes_and_the_other_reads() -> None:
    memory = SharedMemory(NAME, 8192)
    mmap.mmap(memory.file, 0)[5:8] = b"abc"
    part = memory.view[5:8]
    assert bytes(part) == b"abc"
    with pytest.raises(TypeError):
        part[0] = 1
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file, 0)
    memory.close()
    memory.close()
    assert bytes(part) == b"abc", "it stays mapped"


def test_cleared_memory_is_zeros_and_takes_no_room() -> None:
    memory = SharedMemory(NAME, 1 << 20)
    written = mmap.mmap(memory.file, 0)
    written[:] = b"a" * (1 << 20)
    part = memory.view[100:200]
    before = os.fstat(memory.file).st_blocks
    memory.clear()
    assert before > os.fstat(memory.file).st_blocks == 0
    assert bytes(part) == bytes(100)
    assert not any(memory.view)
    written[:3] = b"abc"
    assert bytes(memory.view[:4]) == b"abc\0", "who has it mapped writes on"
    assert os.fstat(memory.file).st_size == 1 << 20


def test_bytes_are_received_whole_and_nobody_changes_them() -> None:
    made = SharedBytes.of(NAME, DATA)
    assert len(pickle.dumps(made)) < 200
    found = received(made)
    assert bytes(found.view) == bytes(made.view) == DATA
    assert found.file == -1
    assert made.sha256 == hashlib.sha256(DATA).digest()
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(made.file, size)
    with pytest.raises(PermissionError):
        os.pwrite(made.file, b"a", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(made.file, 0)
    with pytest.raises(TypeError):
        found.view[0] = 1


@pytest.mark.slow
def test_it_is_let_go_of_with_the_last_reference() -> None:
    before = num_uses()
    memory, made = SharedMemory(NAME, 4096), SharedBytes.of(NAME, DATA)
    found = received(made)
    assert num_uses() > before
    del made
    assert bytes(found.view) == DATA, "it is another process's"
    part = found.view[1:3]
    del memory, found
    assert num_uses() == before + 2, "a mapping, and its descriptor"
    assert bytes(part) == DATA[1:3]
    del part
    assert num_uses() == before


def test_another_file_is_refused_and_closed() -> None:
    found = SharedBytes(10, 0)
    other, (reads, writes) = SharedBytes.of(NAME, DATA), os.pipe()
    for file in (os.dup(other.file), reads):
        with pytest.raises(OSError, match="in place of 10"):
            found.receive(file, Mapped())
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)
    os.close(writes)
    assert not found.is_here
