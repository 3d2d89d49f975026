from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress

import pytest

from adapter_store.errors import InvalidAdapter, LimitExceeded
from adapter_store.sources.staging import CONCURRENT_HASH_BYTES, Staging
from adapter_store.sources.upload import FileChunk, Upload
from contract.adapter_files import MAX_FILES
from servicekit.errors import InvalidArgument

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def test_chunks_of_files_may_alternate(staging):
    upload = Upload(staging)
    for chunk in (
        FileChunk(WEIGHTS, 0, b"ab"),
        FileChunk(CONFIG, 0, b"{"),
        FileChunk(WEIGHTS, 2, b"c"),
        FileChunk("README.md", 0, b"ignored"),
        FileChunk(CONFIG, 1, b"}"),
    ):
        upload.write(chunk)
    upload.finish()
    assert {path.name: path.read_bytes() for path in staging.folder.iterdir()} == {
        CONFIG: b"{}",
        WEIGHTS: b"abc",
    }


@pytest.mark.parametrize("offset", [1, 5])
def test_a_gap_or_a_repeat_is_refused(staging, offset):
    upload = Upload(staging)
    upload.write(FileChunk(WEIGHTS, 0, b"abc"))
    with pytest.raises(InvalidArgument, match="continues at 3") as caught:
        upload.write(FileChunk(WEIGHTS, offset, b"d"))
    assert caught.value.subject == "chunk.offset"
    upload.abandon()


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0b", "x" * 200, "a\\b"]
)
def test_only_plain_file_names(staging, name):
    upload = Upload(staging)
    with pytest.raises(InvalidArgument, match="not a plain file name") as caught:
        upload.write(FileChunk(name, 0, b"x"))
    assert caught.value.subject == "chunk.file_name"
    assert list(staging.folder.iterdir()) == []


def test_limits_count_what_is_ignored_too(make_staging):
    upload = Upload(make_staging(max_adapter_bytes=100, max_file_bytes=60))
    upload.write(FileChunk(WEIGHTS, 0, b"x" * 60))
    with pytest.raises(LimitExceeded, match=WEIGHTS):
        upload.write(FileChunk(WEIGHTS, 60, b"x"))
    with pytest.raises(LimitExceeded, match="notes"):
        upload.write(FileChunk("notes", 0, b"x" * 41))
    upload.abandon()


def test_the_number_of_files_is_limited(staging):
    upload = Upload(staging)
    for i in range(MAX_FILES):
        upload.write(FileChunk(f"file{i}", 0, b""))
    with pytest.raises(LimitExceeded, match=str(MAX_FILES)):
        upload.write(FileChunk("one-more", 0, b""))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], CONFIG),
        ([WEIGHTS], CONFIG),
        ([CONFIG], f"{WEIGHTS} is missing"),
        ([CONFIG, "adapter_model.bin"], "adapter_model.bin is a pickle"),
    ],
)
def test_an_incomplete_upload_is_refused(staging, files, message):
    upload = Upload(staging)
    for name in files:
        upload.write(FileChunk(name, 0, b"x"))
    with pytest.raises(InvalidAdapter, match=message):
        upload.finish()
    upload.abandon()


def test_after_the_end_nothing_is_written(staging):
    upload = Upload(staging)
    upload.write(FileChunk(WEIGHTS, 0, b"abc"))
    upload.abandon()
    upload.write(FileChunk(WEIGHTS, 3, b"d"))
    assert (staging.folder / WEIGHTS).read_bytes() == b"abc"


def open_files(staging: Staging) -> int:
    """Files of the folder that this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was the listing's own
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(staging.folder))
    return found


def test_an_upload_has_one_file_and_one_thread_of_its_own(make_staging):
    """However many files it sends pieces of, and in whatever order."""
    staging = make_staging(max_adapter_bytes=1 << 30)
    upload = Upload(staging)
    names = [f"adapter_model-{i:05d}-of-00064.safetensors" for i in range(64)]
    block = os.urandom(CONCURRENT_HASH_BYTES)
    num_threads = threading.active_count()
    for turn in range(2):
        for name in names:
            upload.write(FileChunk(name, 0 if turn == 0 else len(block), block))
            assert open_files(staging) <= 1
    assert threading.active_count() <= num_threads + 1
    upload.write(FileChunk(CONFIG, 0, b"{}"))
    upload.write(FileChunk(WEIGHTS, 0, b""))
    upload.finish()
    staging.work.wait_durable()
    assert open_files(staging) == 0
    sha256 = hashlib.sha256(2 * block).hexdigest()
    assert [file.sha256 for file in staging.files if file.name in names] == [sha256] * 64
    assert all((staging.folder / name).read_bytes() == 2 * block for name in names)
    staging.remove()
    assert not staging.folder.exists()


def test_empty_chunks_open_no_files(staging):
    upload = Upload(staging)
    for i in range(MAX_FILES):
        upload.write(FileChunk(f"adapter_model-{i:05d}-of-00256.safetensors", 0, b""))
    assert open_files(staging) <= 1
    upload.abandon()
    assert open_files(staging) == 0


def test_what_would_be_dropped_is_refused_by_name(staging):
    """Not only this project's client uploads."""
    upload = Upload(staging)
    for name in (CONFIG, WEIGHTS, "optimizer.pt", "new_embeddings.safetensors"):
        upload.write(FileChunk(name, 0, b"x"))
    with pytest.raises(InvalidAdapter, match=r"new_embeddings\.safetensors: rows of ") as caught:
        upload.finish()
    assert caught.value.reason == "FILE_UNUSED"
    upload.abandon()
