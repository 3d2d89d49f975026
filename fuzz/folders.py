"""Fuzzes folders and uploads made by strangers, with any entries in any order."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from adapter_store.api import convert as store_convert
from adapter_store.api.bounds import REQUESTS
from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.memory_files import MemoryFolder
from adapter_store.checkpoint.reading.scan import scan_tensors
from adapter_store.errors import CorruptData, InvalidAdapter, LimitExceeded, SourceUnavailable
from adapter_store.registration.registrar import Registration
from adapter_store.sources.limits import FetchLimits, StagedBytes
from adapter_store.sources.local import LocalSource
from adapter_store.sources.staging import Staging
from adapter_store.sources.upload import FileChunk, Upload
from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from contract.folders import FileRefused, GivenFolder
from fuzz.refusals import refused
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.errors import InvalidArgument as ClientRefusal
from loadout.upload import AdapterFolder, open_folder
from servicekit.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    ShareExceeded,
)
from servicekit.shares import Shares

T = TypeVar("T")

SEPARATOR = b"\xff\xff\xff\xff"
SECRET = b"the-private-key"
LIMITS = CheckpointLimits(
    max_config_bytes=1 << 16,
    max_header_bytes=1 << 16,
    max_tensors=256,
    max_source_bytes=1 << 20,
    max_rank=512,
    max_match_seconds=0.2,
)
MAX_SPARSE_BYTES = 1 << 42
MAX_ENTRIES = 16
MAX_FILE_BYTES, MAX_STAGED_BYTES, MAX_QUOTA_BYTES = 1 << 16, 1 << 15, 1 << 14
_SHARED_MEMORY = Path("/dev/shm")

# --- folders ------------------------------------------------------------------------------------


def fuzz_folder(data: bytes) -> None:
    """Reads a folder of Hugging Face's cache as a client does, and copies it as a store does.

    The folder is refused or has an adapter. Readers stay within the repository, do not wait for
    pipes, and do not read files that are too large.

    A separator stands between entries. Each entry is a letter, its name, a NUL and its content:
    `f` is a regular file with its bytes; `s` a sparse file with its size, a space and its first
    bytes; `l` a link with its destination; `p` a pipe; `d` a folder; `u` a socket.
    """
    snapshot = _repository() / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    try:
        for entry in data.split(SEPARATOR)[:MAX_ENTRIES]:
            # No file system allows some of these entries.
            with suppress(OSError, ValueError, OverflowError):
                _make(snapshot, entry)
        _read_as_client(snapshot)
        _read_as_command(snapshot)
        _read_as_store(snapshot)
    finally:
        shutil.rmtree(snapshot)


def _make(folder: Path, entry: bytes) -> None:
    kind, (name, _, content) = entry[:1], entry[1:].partition(b"\0")
    if not name or b"/" in name or name in (b".", b".."):
        return
    path = os.fsencode(folder) + b"/" + name
    if kind == b"l":
        os.symlink(content, path)
    elif kind == b"p":
        os.mkfifo(path)
    elif kind == b"d":
        os.mkdir(path)
    elif kind == b"u":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
    elif kind == b"s":
        size, _, content = content.partition(b" ")
        with open(path, "xb") as file:
            file.write(content)
            file.truncate(min(int(size), MAX_SPARSE_BYTES))
    else:
        with open(path, "xb") as file:
            file.write(content)


@cache
def _repository() -> Path:
    """Makes a repository of a hub's cache, with good and bad blobs, next to a secret."""
    base = Path(tempfile.mkdtemp(prefix="loadout-fuzz-", dir=_work_dir()))
    (base / "secret").write_bytes(SECRET)
    (base / "secret.json").write_text(
        '{"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], '
        f'"base_model_name_or_path": "{SECRET.decode()}"}}'
    )
    blobs = base / "models--org--adapter" / "blobs"
    blobs.mkdir(parents=True)
    corpus = Path(__file__).with_name("corpus") / "checkpoint"
    config, _, weights = (corpus / "lora").read_bytes().partition(SEPARATOR)
    (blobs / ("a" * 64)).write_bytes(config)
    (blobs / ("b" * 64)).write_bytes(weights)
    (blobs / ("c" * 64)).symlink_to("../../secret.json")
    os.mkfifo(blobs / ("d" * 64))
    (blobs / ("e" * 64)).mkdir()
    return blobs.parent


def _work_dir() -> Path | None:
    """Returns a folder in memory, if the machine has one."""
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None


def _read_as_client(path: Path) -> None:
    """Reads a folder as `loadout register` does before an upload."""
    found: AdapterFolder | None = None
    with refused(ClientRefusal):
        found = open_folder(path)
    if found is not None and found.total_bytes <= LIMITS.max_source_bytes:
        try:
            sent = b"".join(data for _, _, data in found.pieces())
        except FileRefused as refusal:
            raise AssertionError("the folder opened, and nobody has written to it") from refusal
        assert SECRET not in sent, "the reader leaves the folder"
        assert len(sent) == found.total_bytes


def _read_as_command(path: Path) -> None:
    """Reads a folder as `loadout digest` does."""
    with GivenFolder(path) as folder, refused(InvalidAdapter, LimitExceeded, CorruptData):
        _check(open_checkpoint(folder, LIMITS))


def _read_as_store(path: Path) -> None:
    """Copies a folder as a store does whose source is the repository."""
    source = LocalSource([_repository()])
    with (
        staging(is_in_memory=True) as copied,
        refused(
            InvalidArgument,
            InvalidAdapter,
            LimitExceeded,
            NotFound,
            FailedPrecondition,
            SourceUnavailable,
        ),
    ):
        source.fetch(path.as_uri(), copied)
        copied.work.wait_durable()
        assert isinstance(copied.contents, MemoryFolder)
        for name in copied.contents.names:
            assert SECRET not in read_all(copied.contents, name), "the source leaves its roots"


def _check(checkpoint: Checkpoint) -> None:
    assert checkpoint.rank <= LIMITS.max_rank
    assert SECRET.decode() not in checkpoint.base_model, "the reader leaves the folder"


# --- uploads ------------------------------------------------------------------------------------


@contextmanager
def staging(*, is_in_memory: bool, staged: StagedBytes | None = None) -> Iterator[Staging]:
    """Opens a folder to receive an adapter, and removes it at the end."""
    path = Path(tempfile.mkdtemp(prefix="loadout-fuzz-", dir=_work_dir()))
    found = Staging(
        path, FetchLimits(LIMITS.max_source_bytes, MAX_FILE_BYTES), None, staged,
        in_memory=is_in_memory,
    )  # fmt: skip
    try:
        yield found
    finally:
        found.remove()
        assert not path.exists(), "files are left"


def read_all(folder: MemoryFolder, name: str) -> bytes:
    """Returns the bytes of a file in a folder in memory."""
    file = folder.get(name)
    assert file is not None
    return file.read_at(0, file.size_bytes)


def fuzz_upload(data: bytes) -> None:
    """Uploads an adapter: a byte that chooses disk or memory, then separated messages.

    The upload is refused, or its files equal the joined chunks. Either way no file stays and no
    byte stays counted.
    """
    is_in_memory = not data.startswith(b"d")
    raws = data[1:].split(SEPARATOR)
    shares = Shares("staged bytes", MAX_STAGED_BYTES)
    staged = StagedBytes(shares, "tenant", MAX_QUOTA_BYTES)
    expected: dict[str, bytes] = {}
    with (
        staging(is_in_memory=is_in_memory, staged=staged) as arriving,
        refused(
            InvalidArgument,
            LimitExceeded,
            InvalidAdapter,
            CorruptData,
            ShareExceeded,
            QuotaExceeded,
        ),
    ):
        upload = Upload(arriving)
        try:
            run_now(_write(upload, raws, expected))
            upload.finish()
        finally:
            upload.abandon()
        _check_upload(arriving, expected)
        assert shares.used <= MAX_STAGED_BYTES
    assert shares.used == 0, "bytes stay counted"


async def _write(upload: Upload, raws: list[bytes], expected: dict[str, bytes]) -> None:
    registration, chunks = await store_convert.from_upload(_messages(raws))
    assert isinstance(registration, Registration)
    async for chunk in chunks:
        upload.write(chunk)
        expected[chunk.file_name] = expected.get(chunk.file_name, b"") + bytes(chunk.data)


async def _messages(raws: list[bytes]) -> AsyncIterator[Any]:
    """Yields messages as the store reads them: chunks without copies where possible, which equal
    protobuf's."""
    bounds = REQUESTS["UploadAdapter"]
    for raw in raws:
        bounds.check_size(raw)
        direct = store_convert.read_chunk(raw)
        if direct is not None:
            _check_direct(direct, raw)
        yield direct or bounds.parse(raw)


def _check_direct(direct: FileChunk, raw: bytes) -> None:
    chunk = pb.UploadAdapterRequest.FromString(raw).chunk
    assert (direct.file_name, direct.offset) == (chunk.file_name, chunk.offset)
    assert bytes(direct.data) == chunk.data


def _check_upload(arrived: Staging, expected: dict[str, bytes]) -> None:
    arrived.work.wait_durable()
    names = {file.name for file in arrived.files}
    assert names == {name for name in expected if arrived.accepts(name)}
    assert {CONFIG_FILE} < names
    for file in arrived.files:
        assert file.size_bytes == len(expected[file.name])
        if isinstance(arrived.contents, MemoryFolder) and file.name in arrived.contents.names:
            assert read_all(arrived.contents, file.name) == expected[file.name]
        else:
            assert (arrived.folder / file.name).read_bytes() == expected[file.name]
    checkpoint = open_checkpoint(arrived.contents, LIMITS)
    if isinstance(arrived.contents, MemoryFolder) and WEIGHTS_FILE in names:
        _check_scanned(arrived.contents, checkpoint)


def _check_scanned(folder: MemoryFolder, checkpoint: Checkpoint) -> None:
    """Checks that the scan of a file during its arrival equals a scan of its bytes."""
    known = folder.scanned(checkpoint.records)
    if known is None:
        return
    try:
        read = scan_tensors(folder, checkpoint.records)
    except InvalidAdapter as refusal:
        raise AssertionError("the bytes are refused, and arrived well") from refusal
    assert known.keys() == read.keys()
    for key, found in known.items():
        assert found.sha256 == read[key].sha256
        assert found.largest <= read[key].largest  # the maximum of tensors read at once


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits, without an event loop, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    coroutine.close()
    raise AssertionError("the coroutine waits")
