"""A store that finds its catalog gone or damaged does not start, and removes nothing."""

from __future__ import annotations

import shutil
import signal

import pytest

from tests.support.wait import TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def stopped(spawn, connect, make_adapter, tmp_path):
    """The data folder of a store that has stopped right after its first registration."""
    process = spawn()
    connect(process.wait_until_ready()["grpc"]).register("a", make_adapter())
    assert process.end(signal.SIGTERM)[0] == 0
    return tmp_path / "data"


def refusal(process) -> str:
    assert process.process.wait(TIMEOUT_S) == 1
    return process.log.read_text()


def test_without_its_catalog_a_store_removes_no_source(spawn, connect, stopped, tmp_path):
    kept = tmp_path / "kept.sqlite3"
    for name in ("catalog.sqlite3-wal", "catalog.sqlite3-shm"):
        (stopped / name).unlink(missing_ok=True)
    shutil.move(stopped / "catalog.sqlite3", kept)
    assert "--allow-empty-catalog" in refusal(spawn())
    assert "--allow-empty-catalog" in refusal(spawn())  # the first left an empty one
    assert len(list((stopped / "blobs").iterdir())) == 1
    shutil.copy(kept, stopped / "catalog.sqlite3")
    process = spawn()
    assert connect(process.wait_until_ready()["grpc"]).get("a").version == 1


def test_with_the_flag_it_starts_anew(spawn, stopped):
    (stopped / "catalog.sqlite3").unlink()
    spawn("--allow-empty-catalog").wait_until_ready()
    assert not list((stopped / "blobs").iterdir())


@pytest.mark.parametrize("place", [0, 4096])
def test_a_damaged_catalog_is_named(spawn, stopped, place):
    path = stopped / "catalog.sqlite3"
    data = bytearray(path.read_bytes())
    data[place : place + 2048] = b"\xa5" * 2048
    path.write_bytes(data)
    log = refusal(spawn())
    assert str(path) in log
    assert "restore it from a backup" in log
    assert len(list((stopped / "blobs").iterdir())) == 1
