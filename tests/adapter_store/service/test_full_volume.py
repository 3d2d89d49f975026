"""A store whose volume is full: it starts, serves, and can be emptied, over either catalog."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest

from adapter_store.blobs.volume import NUM_PIECES
from contract.images.dtypes import DataType
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.prometheus import scrape
from tests.support.machine.small_volume import SmallVolume, small_volume
from tests.support.store.adapters import MODULES
from tests.support.store.buckets import AWS, Shared
from tests.support.store.client import Client
from tests.support.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

MIB = 1 << 20
VOLUME_BYTES = 16 * MIB
FLAGS = ("--delete-grace-seconds=0.2",)
ENVIRONMENT = {
    **AWS,
    "LOADOUT_STORE_COMPILE_AHEAD": "false",  # an image that is half written frees space later
    "LOADOUT_STORE_COLLECT_SECONDS": "0.2",
    "LOADOUT_STORE_EPHEMERAL_GRACE_SECONDS": "0.2",
}


class Full:
    """A store on a small volume, as a process that can be started again. Its sources are in the
    bucket `shared`, or on the volume."""

    def __init__(
        self, spawn, connect, volume: SmallVolume, shared, *flags: str, **environment
    ) -> None:
        self._spawn, self._connect, self._flags = spawn, connect, (*FLAGS, *flags)
        self._environment = {**ENVIRONMENT, **environment}
        self.volume, self._shared = volume, shared
        self.start()

    def start(self) -> None:
        self.process = self._spawn(*self._flags, volume=self.volume, **self._environment)
        self.addresses = self.process.wait_until_ready()
        self.client: Client = self._connect(self.addresses["grpc"])

    def end(self, number: int) -> None:
        self.client.close()
        self.process.end(number)

    @property
    def is_full(self) -> bool:
        return bool(scrape(self.addresses["metrics"]).one("loadout_store_volume_full"))

    @property
    def stored(self) -> set[str]:
        """The digests whose sources are stored."""
        if self._shared is None:
            found = self.names("blobs")
        else:
            found = {key.split("/")[2] for key in self._shared.keys("blobs")}
        return {f"sha256:{digest}" for digest in found}

    def names(self, folder: str) -> set[str]:
        """What lies in a folder of the data folder, which may not be there yet."""
        path = self.volume.outside / folder
        return {each.name for each in path.iterdir()} if path.exists() else set()


@pytest.fixture
def volume(tmp_path) -> Iterator[SmallVolume]:
    with small_volume(tmp_path / "data", VOLUME_BYTES) as volume:
        yield volume


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, spawn, connect, volume) -> Iterator[Full]:
    if request.param == "sqlite":
        yield Full(spawn, connect, volume, None)
        return
    endpoint = request.getfixturevalue("s3_endpoint")
    shared = Shared(endpoint, f"b{time.time_ns()}")
    dsn = request.getfixturevalue("catalog_dsn")
    flags = (f"--catalog-dsn={dsn}", f"--shared-s3={shared.uri}", f"--s3-endpoint-url={endpoint}")
    yield Full(spawn, connect, volume, shared, *flags, LOADOUT_STORE_LEASE_SECONDS="1")
    shared.close()


def test_it_serves_and_is_emptied(store, make_adapter, make_layout, refused):
    client = store.client
    folders = {name: make_adapter(folder=name, seed=i) for i, name in enumerate("abcdefgh")}
    digests = {name: client.register(name, folders[name]).adapter.digest for name in "abc"}
    digests |= {name: client.register("many", folders[name]).adapter.digest for name in "defg"}
    layout_id = client.register_layout(make_layout())
    client.pull(digests["a"], layout_id)
    images_folder = f"images/{layout_id.removeprefix('sha256:')}"
    until(lambda: len(store.names(images_folder)) == 2)

    store.volume.fill()
    files = {path.name: path.read_bytes() for path in folders["a"].iterdir()}
    for ephemeral in (False, True):
        with refused("RESOURCE_EXHAUSTED", "volume", "--data-dir is full", "--disk-cache-bytes"):
            client.upload("more", files, ephemeral=ephemeral)
    with refused("RESOURCE_EXHAUSTED", "volume", "--data-dir is full", "--disk-cache-bytes"):
        client.register("more", folders["a"])
    assert store.is_full
    assert client.get("b").digest == digests["b"]
    assert len(client.stub.ListAdapters(pb.ListAdaptersRequest()).adapters) >= 4
    images = store.names(images_folder)
    for name in "abg":  # from memory, and two that are compiled now
        assert client.pull(digests[name], layout_id).is_whole
    assert store.names(images_folder) == images

    store.volume.empty()
    until(lambda: not store.is_full)
    client.register("short-lived", folders["h"], ttl_seconds=1)
    store.volume.fill()
    client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    pruned = client.stub.PruneVersions(pb.PruneVersionsRequest(name="many", keep=1))
    assert list(pruned.deleted_versions) == [1, 2, 3]
    until(lambda: store.stored == {digests[name] for name in "bcg"})
    with refused("NOT_FOUND"):
        client.get("short-lived")

    store.volume.empty()
    until(lambda: not store.is_full)
    assert client.upload("more", files).adapter.digest == digests["a"]
    assert len(store.names("reserve")) == NUM_PIECES


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_starts(store, make_adapter, make_layout, refused, number):
    digest = store.client.register("a", make_adapter()).adapter.digest
    store.client.register("b", make_adapter(folder="b", seed=1))
    layout_id = store.client.register_layout(make_layout())
    store.volume.fill()
    for _ in range(2):  # the first has taken a part of the reserve
        store.end(number)
        store.volume.fill()
        store.start()
        assert store.is_full
        assert store.client.pull(digest, layout_id).is_whole
        with refused("RESOURCE_EXHAUSTED", "--data-dir is full"):
            store.client.register("c", make_adapter(folder=f"c{time.time_ns()}", seed=2))
    store.client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    until(lambda: digest not in store.stored)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_an_upload_ends_before_it_fills_the_volume(store, refused):
    files = {"adapter_model.safetensors": bytes(VOLUME_BYTES)}
    with refused("RESOURCE_EXHAUSTED", "--data-dir is full"):
        store.client.upload("a", files, chunk_bytes=MIB)
    until(lambda: not store.names("staging"))
    assert not store.is_full
    assert len(store.names("reserve")) == NUM_PIECES


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_without_a_reserve_images_make_room(store, make_adapter, make_layout):
    """As a store has none that was last run by an earlier release, or beside a program that takes
    all that becomes free."""
    layout_id = store.client.register_layout(make_layout())
    names = tuple(MODULES)
    for i in range(8):
        folder = make_adapter(folder=str(i), seed=i, modules=names, rank=64)
        digest = store.client.register(f"a{i}", folder).adapter.digest
        store.client.pull(digest, layout_id)
    folder = f"images/{layout_id.removeprefix('sha256:')}"
    until(lambda: len(store.names(folder)) == 16)
    store.end(signal.SIGTERM)
    shutil.rmtree(store.volume.outside / "reserve")
    store.volume.fill()
    store.start()
    assert len(store.names(folder)) < 16
    assert store.client.pull(digest, layout_id).is_whole
    store.client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a7"))


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_new_layout_takes_nothing_of_the_reserve(store, make_layout, refused):
    known = make_layout()
    layout_id = store.client.register_layout(known)
    store.volume.fill()
    assert store.client.register_layout(known) == layout_id
    with refused("RESOURCE_EXHAUSTED", "--data-dir is full"):
        store.client.register_layout(make_layout(dtype=DataType.BFLOAT16))


def test_it_is_emptied_although_all_is_audited_there(volume, spawn, connect, make_adapter):
    audit = volume.folder / "audit.jsonl"
    flags = (f"--audit-file={audit}", "--audit-required")
    slow = {"LOADOUT_STORE_COLLECT_SECONDS": "3600"}
    store = Full(spawn, connect, volume, None, *flags, **slow)
    store.client.register("a", make_adapter())
    store.volume.fill()
    for _ in range(20):  # until the file's last block is full, which may take a part of a line
        with suppress(grpc.RpcError):
            store.client.stub.PinAdapter(pb.PinAdapterRequest(ref="No Name"))
    store.client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    lines = (store.volume.outside / "audit.jsonl").read_text().splitlines()
    assert '"what": "DeleteAdapter"' in lines[-1]
