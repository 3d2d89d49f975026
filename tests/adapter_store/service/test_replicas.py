"""Two store processes over one PostgreSQL and one S3 server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.prometheus import scrape
from tests.support import forks
from tests.support.store.buckets import AWS, Shared
from tests.support.store.client import Client
from tests.support.wait import until

pytestmark = pytest.mark.slow

START_SECONDS = 120
WAIT_SECONDS = 60
LEASE_SECONDS = 2


ENVIRONMENT = {
    **AWS,
    "LOADOUT_STORE_LEASE_SECONDS": str(LEASE_SECONDS),
    "LOADOUT_STORE_COLLECT_SECONDS": "0.3",
    "LOADOUT_STORE_BOOKMARK_SECONDS": "0.5",
}


class Replica:
    """A store process. `client` speaks to it while it lives."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self._arguments = arguments
        folder.mkdir()
        self.start()

    def start(self) -> None:
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        flags = ["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]
        flags += [f"--data-dir={self.folder / 'data'}", f"--ready-file={ready}"]
        self.process = forks.start(
            "adapter_store", [*self._arguments, *flags], self.folder / "log", ENVIRONMENT
        )
        until(lambda: ready.exists() or self.process.poll() is not None, START_SECONDS)
        assert self.process.poll() is None, self.log()
        self.client = Client(json.loads(ready.read_text())["grpc"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self.client.close()

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(WAIT_SECONDS)
            assert self.process.returncode == 0, self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text()[-4000:]


@pytest.fixture
def shared(s3_endpoint) -> Iterator[Shared]:
    shared = Shared(s3_endpoint, f"b{time.time_ns()}")
    yield shared
    shared.close()


@pytest.fixture
def replicas(s3_endpoint, shared, catalog_dsn, tmp_path) -> Iterator[list[Replica]]:
    arguments = [
        f"--catalog-dsn={catalog_dsn}",
        f"--shared-s3={shared.uri}",
        f"--s3-endpoint-url={s3_endpoint}",
        f"--source-roots={tmp_path}",
        "--delete-grace-seconds=0.5",
    ]
    with ExitStack() as stack:
        replicas = []
        for i in range(2):
            replicas.append(Replica(tmp_path / f"replica{i}", arguments))
            stack.callback(replicas[-1].stop)
        yield replicas


def test_metrics_outlast_the_catalog(
    serve, postgres, catalog_dsn, s3_endpoint, shared, monkeypatch
):
    """Whoever looks into an outage of the database needs them most."""
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    store = serve(catalog_dsn=catalog_dsn, shared_s3=shared.uri, s3_endpoint_url=s3_endpoint)
    address, of_catalog = store.running.metrics_address, "loadout_store_revision"
    assert scrape(address).select(of_catalog)
    postgres.stop()
    try:
        found = scrape(address)
        assert not found.select(of_catalog)
        assert found.one("loadout_store_tier_capacity_bytes", tier="memory") > 0
    finally:
        postgres.start()
    until(lambda: scrape(address).select(of_catalog))


def states(client: Client, ref: str) -> list[int]:
    return [state.state for state in client.get(ref).layout_states]


def test_two_replicas_are_one_store(replicas, shared, make_adapter, make_layout):
    """Visible and pullable at the other at once, heard of, compiled once, collected everywhere."""
    one, two = (replica.client for replica in replicas)
    layout_id = one.register_layout(make_layout())
    watch = two.stub.WatchAdapters(pb.WatchAdaptersRequest(since_revision=0), timeout=WAIT_SECONDS)
    registered = one.register("team/a", make_adapter())
    start = time.monotonic()
    assert two.get("team/a").digest == registered.adapter.digest
    pulled = two.pull(registered.adapter.digest, layout_id)
    assert pulled.is_whole
    event = next(r.event for r in watch if r.event.kind == pb.EVENT_KIND_REGISTERED)
    assert (event.revision, event.digest) == (registered.revision, registered.adapter.digest)
    assert time.monotonic() - start < 10  # a few hundredths of a second on a quiet machine
    watch.cancel()
    assert one.pull(registered.adapter.digest, layout_id).data == pulled.data
    until(lambda: states(one, "team/a") == [pb.IMAGE_STATE_READY])
    assert len(shared.keys("compiled")) == 1
    statuses = [c.stub.GetStoreStatus(pb.GetStoreStatusRequest()) for c in (one, two)]
    assert sum(status.shared.hits for status in statuses) >= 1
    assert len(shared.keys("blobs")) == 2
    two.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="team/a"))
    until(lambda: not shared.keys("blobs") and not shared.keys("compiled"))
    with pytest.raises(grpc.RpcError, match="no adapter"):
        one.pull(registered.adapter.digest, layout_id)
    again = two.register("team/a", make_adapter(folder="again"))
    assert one.pull(again.adapter.digest, layout_id).data == pulled.data


def test_a_killed_replica_loses_nothing_and_leaves_nothing(
    replicas, shared, make_adapter, make_layout
):
    layout_id = replicas[0].client.register_layout(make_layout())
    answered: dict[str, str] = {}
    folders = {f"team/n{i}": make_adapter(seed=i, folder=f"n{i}") for i in range(12)}

    def register() -> None:
        with suppress(grpc.RpcError):
            for name, folder in folders.items():
                answered[name] = replicas[0].client.register(name, folder).adapter.digest

    worker = threading.Thread(target=register)
    worker.start()
    until(lambda: len(answered) >= 4)
    replicas[0].kill()
    worker.join()
    two = replicas[1].client
    page = two.stub.ListAdapters(pb.ListAdaptersRequest())
    found = {adapter.name: adapter.digest for adapter in page.adapters}
    assert answered.items() <= found.items()
    for digest in found.values():
        assert two.pull(digest, layout_id).is_whole
    # What the killed one was storing goes once its lease has ended.
    until(lambda: len(shared.keys("blobs")) == 2 * len(set(found.values())))
    replicas[0].start()
    for digest in found.values():
        assert replicas[0].client.pull(digest, layout_id).is_whole
