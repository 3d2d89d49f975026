"""Blobs appear whole or not at all, whatever step fails, and wherever the process dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import weakref

import pytest

from adapter_store.blobs import fsync
from adapter_store.blobs.local import LocalBlobs
from adapter_store.blobs.volume import Volume
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.names import Names
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.checkpoint.reading.recently_verified import VerifiedCheckpoints
from adapter_store.errors import LimitExceeded
from adapter_store.images.compile import compile_image
from adapter_store.metrics.registry import Metrics
from adapter_store.registration.registrar import Registrar, Registration
from adapter_store.registration.tenant_policy import open_policy
from adapter_store.sources import Sources
from adapter_store.sources.limits import FetchLimits
from adapter_store.sources.local import LocalSource
from adapter_store.sources.transfer import FetchRunner
from servicekit.pace import Pace
from servicekit.refs import AdapterName
from servicekit.shares import Shares

DIGEST = "sha256:" + "ab" * 32


class Process:
    """The blocking half of a store on one folder; made anew, it is a process after a crash."""

    def __init__(self, tmp_path, data_dir) -> None:
        self.data_dir = data_dir
        self.catalog = Catalog(self.data_dir / "catalog.sqlite3", event_retention=100)
        self.blobs = LocalBlobs(self.data_dir)
        self.blobs.sweep_leftovers()
        self.blobs.sweep(self.catalog.blobs.digests())
        self.registrar = Registrar(
            self.catalog.names,
            self.catalog.blobs,
            self.blobs,
            Volume(self.data_dir, evict=lambda num_bytes: None),
            VerifiedCheckpoints(),
            Sources({"file": LocalSource([tmp_path])}),
            Metrics(),
            FetchLimits(1 << 20, 1 << 20),
            CheckpointLimits(),
            open_policy(None),
            threading.Event(),
            FetchRunner(Pace(1, 60), 1, 16),
            Shares("staged_bytes", 1 << 30),
            Shares("ephemeral_bytes", 1 << 30),
            lambda tenant: None,
        )

    def close(self) -> None:
        self.catalog.close()

    def register(self, folder, name: str = "a"):
        asked = Registration(AdapterName("default", name))
        return self.registrar.register(asked, f"file://{folder}")

    def check_whole(self) -> list[str]:
        """Every record has its blob, and every blob its digest; gives the digests."""
        records = self.catalog.names.page()[0]
        for record in records:
            blob = open_checkpoint(self.blobs.path(record.digest))
            assert blob.digest == record.digest
        folders = {path.name for path in (self.data_dir / "blobs").iterdir()}
        assert folders == {record.digest.removeprefix("sha256:") for record in records}
        assert list((self.data_dir / "staging").iterdir()) == []
        assert list((self.data_dir / "trash").iterdir()) == []
        return [record.digest for record in records]


@pytest.fixture
def start(tmp_path, migrated_file):
    """start(data_dir=None): a process on that folder, and the one before it is gone."""
    with contextlib.ExitStack() as stack:

        def make(data_dir=None) -> Process:
            data_dir = data_dir or tmp_path / "data"
            if not data_dir.exists():
                data_dir.mkdir()
                shutil.copy(migrated_file, data_dir)
            process = Process(tmp_path, data_dir)
            stack.callback(process.close)
            return process

        yield make


class Crash(BaseException):
    """The process ends here: no handler may run on."""


STEPS = ("fsync", "rename", "rmtree", "commit")


def crash_at(monkeypatch, step: str, number: int) -> list[str]:
    """Lets the `number`-th call of a step end in a crash, and everything after it as well."""
    calls: list[str] = []
    dead: list[bool] = []

    def guard(name: str, function):
        def call(*args, **kwargs):
            if dead:
                raise Crash
            if name == step:
                calls.append(name)
                if len(calls) == number:
                    dead.append(True)
                    raise Crash
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", guard("fsync", os.fsync))
    monkeypatch.setattr(os, "rename", guard("rename", os.rename))
    monkeypatch.setattr(shutil, "rmtree", guard("rmtree", shutil.rmtree))
    monkeypatch.setattr(Names, "register", guard("commit", Names.register))
    return calls


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_nothing_half_visible(
    tmp_path, start, make_adapter, monkeypatch, step
):
    first, second = make_adapter(folder="one", seed=1), make_adapter(folder="two", seed=2)
    kept, new = (open_checkpoint(folder).digest for folder in (first, second))
    number = 0
    crashed = True
    while crashed:
        number += 1
        data_dir = tmp_path / f"data{number}"
        process = start(data_dir)
        process.register(first, "first")
        with monkeypatch.context() as patch:
            calls = crash_at(patch, step, number)
            with contextlib.suppress(Crash):
                process.register(second, "second")
        crashed = len(calls) >= number
        again = start(data_dir)
        digests = again.check_whole()
        assert digests in ([kept], [kept, new])
        assert crashed or digests == [kept, new]
        assert again.register(second, "second")[0].digest == new
        assert again.check_whole() == [kept, new]
    assert number > 1


def test_a_failed_step_is_an_error_and_leaves_no_trace(start, make_adapter, monkeypatch):
    process = start()
    folder = make_adapter()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LimitExceeded, match="is full") as caught:
            process.register(folder)
    assert caught.value.reason == "DISK_FULL"
    assert process.check_whole() == []
    process.register(folder)
    assert len(process.check_whole()) == 1


def test_the_same_content_at_the_same_time(start, make_adapter):
    process = start()
    folder = make_adapter()
    found = []

    def work(i: int) -> None:
        found.append(process.register(folder, f"n{i % 2}"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(each.record.version, each.record.digest) for each in found} == {
        (1, open_checkpoint(folder).digest)
    }
    assert process.catalog.history.revision() == 2
    assert len(process.check_whole()) == 2


def test_registering_again_heals_a_damaged_blob(start, make_adapter):
    process = start()
    folder = make_adapter()
    digest = process.register(folder)[0].digest
    weights = process.blobs.path(digest) / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert process.register(folder)[0].version == 1
    assert process.check_whole() == [digest]
    assert len(list((process.data_dir / "damaged").iterdir())) == 1


def test_blob_is_removed_atomically(tmp_path):
    blobs = LocalBlobs(tmp_path)
    staged = blobs.stage()
    (staged / "file").write_bytes(b"x")
    blobs.put(staged, DIGEST)
    assert (blobs.path(DIGEST) / "file").read_bytes() == b"x"
    blobs.remove(DIGEST)
    blobs.remove(DIGEST)
    assert not blobs.path(DIGEST).exists()
    assert list((tmp_path / "trash").iterdir()) == []


def test_earlier_local_blob_stays(tmp_path):
    blobs = LocalBlobs(tmp_path)
    for content in (b"first", b"second"):
        staged = blobs.stage()
        (staged / "file").write_bytes(content)
        blobs.put(staged, DIGEST)
    assert (blobs.path(DIGEST) / "file").read_bytes() == b"first"


def test_move_folder_raises_other_errors(tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(FileNotFoundError):
        fsync.move_folder(tmp_path / "source", tmp_path / "no" / "target")


def test_who_has_a_folder_in_memory_reads_on_and_then_its_memory_is_free(
    tmp_path, make_adapter, make_layout
):
    """An image that is planned when its adapter is collected is compiled to its end."""
    source = make_adapter()
    released: list[bool] = []
    folder = MemoryFolder(on_release=lambda: released.append(True))
    for path in source.iterdir():
        folder.add(MemoryFile(path.name))
        folder.get(path.name).append(path.read_bytes())
    file = weakref.ref(folder.get("adapter_model.safetensors"))
    checkpoint = open_checkpoint(folder)
    blobs, verified = LocalBlobs(tmp_path / "data"), VerifiedCheckpoints()
    blobs.put(folder, checkpoint.digest)
    verified.put(checkpoint)
    planned = verified.find(checkpoint.digest, blobs.path(checkpoint.digest))
    del folder, checkpoint
    blobs.remove(planned.digest)
    assert released
    image = compile_image(planned, make_layout())
    expected = compile_image(open_checkpoint(source), make_layout())
    assert bytes(image.buffer.numpy().data) == bytes(expected.buffer.numpy().data)
    del planned, image
    assert file() is None
