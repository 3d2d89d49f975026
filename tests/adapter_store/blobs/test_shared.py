"""Blobs on a real S3 server process: durable before the commit, and never another one's."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from adapter_store.blobs import shared
from adapter_store.blobs.shared import SharedBlobs
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.checkpoint.reading.memory_files import MemoryFolder
from adapter_store.core import BlobPlace, SourceFile
from adapter_store.errors import BlobLost, CorruptData, DiskFull
from servicekit.refs import AdapterName
from tests.adapter_store.shared_parts import SharedParts, die
from tests.support.machine.small_volume import small_volume
from tests.support.wait import until

A = AdapterName("default", "a")
DIGEST = "sha256:" + "a" * 64
CONTENT = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}
FILES = tuple(
    SourceFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENT.items()
)


@pytest.fixture
def parts(s3_endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with ExitStack() as stack:
        yield SharedParts(s3_endpoint, tmp_path, stack)


def stage(blobs: SharedBlobs) -> Path:
    staged = blobs.stage()
    for name, data in CONTENT.items():
        (staged / name).write_bytes(data)
    return staged


def keep(blobs: SharedBlobs) -> tuple[BlobPlace, Path]:
    staged = stage(blobs)
    return blobs.put(staged, DIGEST, FILES), staged


def record(parts: SharedParts, kept: BlobPlace) -> None:
    parts.catalog.names.register(
        NewVersion(A, DIGEST, "base", "", 1, (), 1, files=FILES, blob=kept)
    )


def register(parts: SharedParts, blobs: SharedBlobs) -> BlobPlace:
    kept, staged = keep(blobs)
    record(parts, kept)
    blobs.finish_put(DIGEST, kept, staged)
    return kept


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def collect(parts: SharedParts) -> str | None:
    parts.catalog.names.remove(A)
    parts.catalog.expiry.expire_deleted(timedelta(0))
    return parts.catalog.blobs.take(DIGEST)


def test_blob_is_read_by_another_replica(parts):
    one, two = parts.blobs("one"), parts.blobs("two")
    assert not one.path(DIGEST).exists()
    register(parts, one)
    assert read(one.path(DIGEST)) == read(two.path(DIGEST)) == CONTENT
    kept, staged = keep(two)
    assert kept.lease == ""  # found, not stored again
    assert staged.is_dir()
    assert len(parts.keys("blobs")) == 2


@pytest.mark.processes
def test_on_a_full_volume_copies_are_in_memory(parts, tmp_path, monkeypatch):
    register(parts, parts.blobs("one"))
    num_bytes = sum(map(len, CONTENT.values()))
    monkeypatch.setattr(shared, "MEMORY_BYTES", num_bytes)
    with small_volume(tmp_path / "small", 4 << 20) as small:
        two = parts.blobs(str(small.outside))
        small.fill()
        copy = two.path(DIGEST)
        assert isinstance(copy, MemoryFolder)
        files = {name: copy.get(name) for name in copy.names}
        assert {name: file.read_at(0, file.size_bytes) for name, file in files.items()} == CONTENT
        with pytest.raises(DiskFull):
            two.path(DIGEST)
        del copy, files
        assert isinstance(two.path(DIGEST), MemoryFolder)
        small.empty()
        assert read(two.path(DIGEST)) == CONTENT


@pytest.mark.processes
def test_on_a_full_volume_copies_make_room_for_one(parts, tmp_path, monkeypatch):
    register(parts, parts.blobs("one"))
    monkeypatch.setattr(shared, "IN_USE_SECONDS", -1)
    with small_volume(tmp_path / "small", 4 << 20) as small:
        two = parts.blobs(str(small.outside))
        other = small.outside / "fetched" / f"{'b' * 64}-place"
        other.mkdir()
        (other / "weights").write_bytes(bytes(2 << 20))
        small.fill()
        assert read(two.path(DIGEST)) == CONTENT
        assert not other.exists()


def test_an_old_place_removed_late_hurts_no_new_registration(parts):
    blobs = parts.blobs("one")
    first = register(parts, blobs)
    place = collect(parts)
    assert place == first.place
    register(parts, blobs)  # before the objects of the collected one are gone
    blobs.remove(DIGEST, place)
    assert read(parts.blobs("two").path(DIGEST)) == CONTENT
    assert len(parts.keys("blobs")) == 2


def test_what_was_collected_before_the_commit_is_noticed(parts):
    blobs = parts.blobs("one")
    register(parts, blobs)
    kept, _ = keep(blobs)
    collect(parts)
    with pytest.raises(BlobLost):
        record(parts, kept)
    assert parts.catalog.blobs.find(DIGEST) is None


def test_of_two_that_store_at_once_one_place_stays(parts):
    one, two = parts.blobs("one"), parts.blobs("two")
    kept, staged = keep(one)
    register(parts, two)
    record(parts, kept)
    one.finish_put(DIGEST, kept, staged)
    assert len(parts.keys("blobs")) == 2
    assert read(one.path(DIGEST)) == CONTENT


def test_what_died_while_it_stored_is_swept(parts):
    leases = parts.leases()
    kept, _ = keep(parts.blobs("one", leases))
    other = parts.blobs("two")
    other.sweep_shared()
    assert len(parts.keys("blobs")) == 2  # it may still be alive
    die(parts, leases)
    other.sweep_shared()
    assert not parts.keys("blobs")
    with pytest.raises(BlobLost, match="longer than its lease"):
        record(parts, kept)


def test_registering_again_replaces_altered_objects(parts):
    blobs = parts.blobs("one")
    register(parts, blobs)
    [key] = [key for key in parts.keys("blobs") if key.endswith(".safetensors")]
    parts.alter(key)
    other = parts.blobs("two")
    with pytest.raises(CorruptData, match="register the adapter again"):
        other.path(DIGEST)
    register(parts, other)
    assert read(parts.blobs("three").path(DIGEST)) == CONTENT
    assert len(parts.keys("blobs")) == 2


def test_unused_copies_are_evicted(parts):
    register(parts, parts.blobs("one"))
    two = parts.blobs("two", capacity=1)
    folder = two.path(DIGEST)
    two._evict()
    assert folder.is_dir()  # it may still be read
    os.utime(folder, (0, 0))
    two._evict()
    assert not folder.exists()
    assert read(two.path(DIGEST)) == CONTENT


def test_pull_right_after_the_commit(parts):
    blobs = parts.blobs("one")
    kept, staged = keep(blobs)
    record(parts, kept)
    folder = blobs.path(DIGEST)  # fetched: the registration has not handed its own files over yet
    blobs.finish_put(DIGEST, kept, staged)
    assert blobs.path(DIGEST) == folder
    assert read(folder) == CONTENT


def is_swept(parts: SharedParts, blobs: SharedBlobs) -> bool:
    """Sweeps; returns whether neither blobs nor unfinished uploads are left."""
    blobs.sweep_shared()
    return not parts.keys("blobs") and not any(parts.bucket.unfinished("blobs/"))


def test_abandoned_put_is_swept_while_its_replica_lives(parts):
    leases = parts.leases(lease_seconds=0.2)
    assert leases.acquire("another")  # is renewed all the time
    blobs = parts.blobs("one", leases)
    kept, _ = keep(blobs)
    blobs.abandon_put(kept)
    until(lambda: is_swept(parts, blobs))
    until(lambda: leases.is_held("another"))  # a late renewal lets it expire for a moment


def test_parts_of_an_upload_that_died_are_swept(parts):
    leases = parts.leases()
    blobs = parts.blobs("one")
    place = "0" * 32
    lease = f"blob:{DIGEST}:{place}"
    assert leases.acquire(lease)
    key = f"blobs/{DIGEST[7:]}/{place}/adapter_model.safetensors"
    options = {"Bucket": parts.name, "Key": f"store/{key}"}
    upload_id = parts.client.create_multipart_upload(**options)["UploadId"]
    parts.client.upload_part(**options, UploadId=upload_id, PartNumber=1, Body=b"x")
    blobs.sweep_shared()
    assert [*parts.bucket.unfinished("blobs/")] == [{key: [upload_id]}]  # it may still be alive
    die(parts, leases)
    until(lambda: is_swept(parts, blobs))
    parts.bucket.abort(key, [upload_id])  # it may have ended
