"""Images that are shared while they are built, sealed and written."""

from __future__ import annotations

import errno
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from adapter_store.images import builder, pull
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.adapter_store.service.receivers import ask, greeted, until_sealed
from tests.support.store.adapters import make_large
from tests.support.store.served import read_metrics
from tests.support.wait import TIMEOUT_S, until

pytestmark = pytest.mark.slow


class Gate:
    """Lets a store compile the first part of each image, and the rest once it is `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._compile = builder.compile_parts
        monkeypatch.setattr(builder, "compile_parts", self._gated)

    def _gated(self, *args, **options):
        with closing(self._compile(*args, **options)) as parts:
            for part in parts:
                yield part
                self.reached.set()
                assert self.open.wait(TIMEOUT_S)


def test_a_small_image_that_is_built_is_waited_for(
    serve, receive, path, make_adapter, make_layout, monkeypatch
):
    monkeypatch.setattr(pull, "AWAITED_SECONDS", TIMEOUT_S)  # however busy the machine is
    gate = Gate(monkeypatch)
    store = serve(share_socket=path, lock_images="off")
    receiver = receive(store.running.grpc_address, path)
    key = make_large(store.client, make_adapter, make_layout, features=1 << 15)
    with ThreadPoolExecutor(1) as threads:
        pulling = threads.submit(receiver.pull, *key)
        assert gate.reached.wait(TIMEOUT_S)
        until(lambda: store.running.store.use_cases.pulls.num_active)
        gate.open.set()
        data = pulling.result(TIMEOUT_S)
    assert receiver.ways() == {"shared"}
    assert data == store.client.pull(*key).data


def test_a_small_image_that_is_built_slowly_is_streamed(
    serve, path, make_adapter, make_layout, monkeypatch
):
    """Its first bytes come before its last are there."""
    monkeypatch.setattr(pull, "AWAITED_SECONDS", 0.2)
    gate = Gate(monkeypatch)
    store = serve(share_socket=path, lock_images="off")
    key = make_large(store.client, make_adapter, make_layout, features=1 << 15)
    connection, share_id = greeted(path)
    connection.close()
    call, header = ask(store, key, share_id)
    assert not gate.open.is_set()
    assert (header.share_ticket, header.not_shared) == (b"", "building")
    assert next(call).chunk.data
    assert read_metrics(store)["pull_wait_seconds_sum",] >= 0.2, "the header came after it"
    gate.open.set()
    assert list(call)[-1].WhichOneof("part") == "trailer"


def test_an_image_is_shared_while_it_is_written(
    serve, receive, path, make_adapter, make_layout, monkeypatch
):
    writing, may_write = threading.Event(), threading.Event()
    write_image = builder.write_image

    def gated(*args):
        writing.set()
        assert may_write.wait(TIMEOUT_S)
        return write_image(*args)

    monkeypatch.setattr(builder, "write_image", gated)
    store = serve(share_socket=path, lock_images="off")
    receiver = receive(store.running.grpc_address, path)
    key = make_large(store.client, make_adapter, make_layout, features=1 << 15)
    try:
        assert writing.wait(TIMEOUT_S)
        data = receiver.pull(*key)
        assert receiver.ways() == {"shared"}
    finally:
        may_write.set()
    store.idle()
    assert receiver.pull(*key) == data == store.client.pull(*key).data
    assert store.running.store.images.disk_counts.images == 1


def test_an_image_that_cannot_be_sealed_is_kept_and_streamed(
    serve, receive, path, make_adapter, make_layout, monkeypatch
):
    """The process has no file for its mapping; later it has."""
    mapped = mmap.mmap

    def without_files(*args, **options):
        if args[2:] == (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(errno.EMFILE, "Too many open files")
        return mapped(*args, **options)

    store = serve(share_socket=path, lock_images="off")
    receiver = receive(store.running.grpc_address, path)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", without_files)
        key = make_large(store.client, make_adapter, make_layout, features=1 << 15)
        store.idle()
        assert store.running.store.images.disk_counts.images == 1
        record = store.client.get("large")
        assert [each.state for each in record.layout_states] == [pb.IMAGE_STATE_READY]
        data = receiver.pull(*key)
        assert receiver.ways() == {"no_file"}
    until_sealed(store, key, path)
    assert receiver.pull(*key) == data
    assert receiver.ways() == {"shared"}


def test_a_large_image_is_streamed_while_it_is_built(
    serve, receive, path, make_adapter, make_layout, monkeypatch
):
    """And later as long as others read it as it was built."""
    gate = Gate(monkeypatch)
    store = serve(share_socket=path, lock_images="off")
    receiver = receive(store.running.grpc_address, path)
    key = make_large(store.client, make_adapter, make_layout)
    request = pb.PullAdapterRequest(digest=key[0], layout_id=key[1])
    reading = store.client.stub.PullAdapter(request)
    next(reading)
    with ThreadPoolExecutor(1) as threads:
        pulling = threads.submit(receiver.pull, *key)
        until(lambda: store.running.store.use_cases.pulls.num_active == 2)
        gate.open.set()
        streamed = pulling.result(TIMEOUT_S)
    assert receiver.ways() == {"building"}
    store.idle()
    assert receiver.pull(*key) == streamed
    assert receiver.ways() == {"in_use"}
    reading.cancel()
    until_sealed(store, key, path)
    assert receiver.pull(*key) == streamed
    assert receiver.ways() == {"shared"}
