"""The memory of images: its files, its spare buffers and its locking."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
import torch

from adapter_store.images.tiers import buffers
from adapter_store.images.tiers.buffers import MIN_FILE_BYTES, BufferPool, NotSealed
from adapter_store.images.tiers.memory_lock import MemoryLock
from tests.support import forks

NUM_BYTES = 2 * MIN_FILE_BYTES


def test_a_shared_buffer_is_never_a_spare():
    pool = BufferPool(4 * NUM_BYTES, has_files=True)
    plain, shared = pool.make(NUM_BYTES), pool.make(NUM_BYTES)
    shared.data.fill_(7)
    shared.set_final()
    file = os.dup(shared.sealed_file())
    assert torch.equal(shared.data, torch.full((NUM_BYTES,), 7, dtype=torch.uint8))
    for buffer in (plain, shared):
        pool.put(buffer)
    assert pool.spare_bytes == NUM_BYTES
    assert pool.take(NUM_BYTES) is plain
    assert pool.take(NUM_BYTES) is not shared
    number = shared.sealed_file()
    del shared, buffer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert os.pread(file, 1, NUM_BYTES - 1) == b"\x07"
    os.close(file)


def test_a_buffer_in_use_is_not_sealed():
    buffer = BufferPool(NUM_BYTES, has_files=True).make(NUM_BYTES)
    reader = buffer.data.numpy().data
    buffer.set_final()
    for _ in range(2):
        with pytest.raises(NotSealed, match="in_use"):
            buffer.sealed_file()
    del reader
    buffer.sealed_file()


def test_without_files_a_buffer_is_sealed_later(caplog):
    """Its mapping takes one more: until then its image is complete, and is streamed."""
    buffer = BufferPool(NUM_BYTES, has_files=True).make(NUM_BYTES)
    buffer.data.fill_(7)
    buffer.set_final()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, usual[1]))
    try:
        for _ in range(2):
            with pytest.raises(NotSealed, match="no_file"):
                buffer.sealed_file()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert "Too many open files" in caplog.text
    assert os.pread(buffer.sealed_file(), NUM_BYTES, 0) == b"\x07" * NUM_BYTES
    assert torch.equal(buffer.data, torch.full((NUM_BYTES,), 7, dtype=torch.uint8))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_mapping_may_have_huge_pages(is_shared):
    """Also the one that a shared image has once it is complete: `hg` of its flags."""
    buffer = BufferPool(8 << 20, has_files=True).make(8 << 20)
    if is_shared:
        buffer.set_final()
        buffer.sealed_file()
    maps = Path("/proc/self/smaps").read_text()
    start = f"{buffer.data.data_ptr():08x}-"
    flags = re.search(rf"^{start}.*?^VmFlags: (.*?)$", maps, re.MULTILINE | re.DOTALL)
    assert flags is not None
    assert "hg" in flags[1].split()


def test_files_are_for_images_worth_it(monkeypatch):
    monkeypatch.setattr(buffers, "MAX_FILES", 2)
    pool = BufferPool(0, has_files=True)
    made = [pool.make(size) for size in (MIN_FILE_BYTES - 1, *3 * [MIN_FILE_BYTES])]
    reasons = []
    for buffer in made:
        try:
            buffer.set_final()
        except NotSealed as error:
            reasons.append(str(error))
    assert reasons == ["small", "no_file"]
    del made[1], buffer
    pool.make(MIN_FILE_BYTES).set_final()
    with pytest.raises(NotSealed, match="no_file"):
        BufferPool(0).make(MIN_FILE_BYTES).set_final()


def locked_bytes() -> int:
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_memory_is_locked():
    before = locked_bytes()
    lock = MemoryLock("on", NUM_BYTES)
    assert (lock.status().is_locked, lock.status().reason) == (True, "")
    for has_files in (False, True):
        buffer = BufferPool(0, lock, has_files=has_files).make(NUM_BYTES)
        assert locked_bytes() == before + NUM_BYTES
        if has_files:
            buffer.set_final()
            buffer.sealed_file()
            assert locked_bytes() == before + NUM_BYTES
        del buffer
        assert locked_bytes() == before
    unlocked = BufferPool(0, MemoryLock("off"), has_files=True).make(NUM_BYTES)
    assert locked_bytes() == before
    del unlocked


LIMITED = """
import os, resource, sys
from adapter_store.images.tiers.memory_lock import MemoryLock
from servicekit.errors import FailedPrecondition
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 65536))
if os.geteuid() == 0:
    os.setuid(65534)  # root may lock everything
print(MemoryLock("auto", 65536).status())
print(MemoryLock("auto", 1 << 30).status())
try:
    MemoryLock("on", 1 << 30)
except FailedPrecondition as error:
    print(error.subject, error)
"""


@pytest.mark.processes
def test_a_limit_that_is_too_low_is_named(tmp_path):
    program = tmp_path / "limited.py"
    program.write_text(LIMITED)
    done = forks.run(str(program))
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    why = "the limit of locked memory is 65536 bytes, and images take up to 1073741824: raise it"
    assert "is_locked=True, reason=''" in found[0]
    assert f"is_locked=False, reason='{why}" in found[1]
    assert found[2].startswith(f"lock_images --lock-images on: {why}")
