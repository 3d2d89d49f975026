"""What is durable before a registration is answered, seen from the kernel's side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter_store.system_calls import SystemCall, Tracer
from tests.support.store.client import Client
from tests.support.wait import until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

DEADLINE_S = 60.0


class Traced:
    """A store as a process of its own, followed since it was ready."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        ready = folder / "ready.json"
        self.log = folder / "store.log"
        flags = [f"--data-dir={self.data}", f"--source-roots={folder}", f"--ready-file={ready}"]
        flags += ["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "adapter_store", *flags],
                stdout=log,
                stderr=log,
                env={**os.environ, "LOADOUT_STORE_COLLECT_SECONDS": "3600"},
            )
        until(lambda: ready.exists() or self._process.poll() is not None)
        assert self._process.poll() is None, self.log.read_text()
        self._tracer = Tracer(self._process.pid)
        self._tracer.start()
        self.client = Client(json.loads(ready.read_text())["grpc"])

    def calls_until_reply(self, digest: str) -> list[SystemCall]:
        """Everything before the first send that holds the digest, which only the reply does."""
        calls = list(self._tracer.calls)
        reply = next(
            i
            for i, call in enumerate(calls)
            if call.name == "send" and digest.encode() in call.data
        )
        return calls[:reply]

    def stop(self) -> None:
        self.client.close()
        # Not through Popen, which asks first whether it has ended, and could be told of a stop.
        os.kill(self._process.pid, signal.SIGKILL)
        self._tracer.join(DEADLINE_S)
        self._process.wait()


@pytest.fixture
def traced(tmp_path) -> Iterator[Traced]:
    store = Traced(tmp_path)
    yield store
    store.stop()


def test_all_is_durable_before_the_reply(traced, make_adapter) -> None:
    registered = make_adapter(folder="registered", seed=1)
    uploaded = make_adapter(folder="uploaded", seed=2)
    answers = [
        traced.client.register("from-a-folder", registered),
        traced.client.upload("from-a-caller", {p.name: p.read_bytes() for p in uploaded.iterdir()}),
    ]
    for answer in answers:
        check_order(traced, answer.adapter.digest)


def check_order(traced: Traced, digest: str) -> None:
    """Each step ends before the next begins: files, their folder, the rename, the folder that it
    changes, the catalog's log, the reply."""
    calls = traced.calls_until_reply(digest)
    blob = traced.data / "blobs" / digest.removeprefix("sha256:")
    (moved,) = [i for i, call in enumerate(calls) if call.target == str(blob)]
    staging = calls[moved].path
    files = {f"{staging}/{path.name}" for path in blob.iterdir()}
    assert len(files) == 2

    folder_synced = last(calls[:moved], ("fsync",), {staging})
    for file in files:
        written = last(calls[:moved], ("write",), {file})
        assert written < last(calls[:moved], ("fsync",), {file}) < folder_synced, file

    after = calls[moved + 1 :]
    folder_synced = last(after, ("fsync",), {str(blob.parent)})
    wal = {f"{traced.data / 'catalog.sqlite3'}-wal"}
    logged = last(after, ("write",), wal)
    committed = last(after, ("fsync", "fdatasync"), wal)
    assert folder_synced < logged < committed, "the catalog was not the last to become durable"


def last(calls: list[SystemCall], names: tuple[str, ...], paths: set[str]) -> int:
    """Where the last such call is. Fails if there is none."""
    found = [i for i, call in enumerate(calls) if call.name in names and call.path in paths]
    assert found, f"no {' or '.join(names)} of {', '.join(sorted(paths))}"
    return found[-1]
