"""Ephemeral registrations: their content is in memory alone, their record as durable as others'."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
import torch
from safetensors.torch import load, save

from adapter_store import build as store_module
from adapter_store.errors import CatalogUnavailable
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.client import Client
from tests.support.wait import until

pytestmark = pytest.mark.slow

NOW = {"ephemeral_grace_seconds": 0.0, "delete_grace_seconds": 0.0, "collect_seconds": 0.05}
WEIGHTS = "adapter_model.safetensors"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def variants(make_adapter):
    """Yields files of adapters of one size, each of another digest."""
    files = files_of(make_adapter())

    def make(number: int) -> dict[str, bytes]:
        tensors = load(files[WEIGHTS])
        first = min(tensors)
        tensors[first].view(-1)[0] = 1 + number / 64
        return files | {WEIGHTS: save(tensors)}

    return make


def push(client: Client, files: dict[str, bytes], **fields) -> pb.UploadAdapterResponse:
    return client.upload("a", files, ephemeral=True, **fields)


def on_disk(tmp_path: Path) -> list[str]:
    """Returns the names of files with an adapter's bytes in the store's folder."""
    data = tmp_path / "data"
    return [path.name for path in data.rglob("*.safetensors")]


def test_it_is_served_and_no_byte_is_on_disk(serve, tmp_path, variants, make_layout) -> None:
    served = serve()
    layout_id = served.client.register_layout(make_layout())
    files = variants(1)
    done = push(served.client, files)
    served.idle()
    image = served.client.pull(done.adapter.digest, layout_id)
    assert image.is_whole
    assert done.adapter.ephemeral
    assert on_disk(tmp_path) == []
    # The same content on disk has the same digest and the same image.
    durable = served.client.upload("b", files)
    assert durable.adapter.digest == done.adapter.digest
    assert served.client.pull(done.adapter.digest, layout_id).data == image.data
    assert not durable.adapter.ephemeral


def test_with_keep_memory_and_catalog_stay_flat(serve, variants, make_layout) -> None:
    served = serve(**NOW)
    served.client.register_layout(make_layout())
    store = served.running.store
    sizes, expected = [], []
    for number in range(12):
        done = push(served.client, variants(number), keep=3)
        assert done.adapter.version == number + 1
        expected.append(min(number + 1, 3))
        until(lambda: len(store.catalog.blobs.digests()) == expected[-1])
        listed = served.client.stub.ListVersions(pb.ListVersionsRequest(name="a")).adapters
        newest_first = [number + 1, number, number - 1]
        assert [each.version for each in listed] == [each for each in newest_first if each > 0]
        served.idle()
        until(lambda: store.images.memory_counts.images == expected[-1])
        uses = {use.name: use.used for use in store.use_cases.status.read_work().places}
        sizes.append(uses["ephemeral_bytes"])
    assert len(set(sizes[3:])) == 1


def test_a_catalog_that_fails_every_second_is_logged_once(
    serve, variants, monkeypatch, caplog
) -> None:
    served = serve(**NOW)
    catalog = served.running.store.catalog
    push(served.client, variants(0))
    for _ in range(2):
        no_answer = Mock(side_effect=CatalogUnavailable("no answer"))
        with monkeypatch.context() as patch:
            patch.setattr(catalog.expiry, "is_due", no_answer)
            until(lambda asked=no_answer: asked.call_count >= 3)
        # It works again once something was collected.
        served.client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
        until(lambda: not catalog.blobs.digests())
        push(served.client, variants(0))
    logged = [each.message for each in caplog.records if each.name == store_module.__name__]
    assert logged == ["collecting failed; trying again"] * 2


def test_a_restart_ends_them_and_gives_no_version_twice(serve, variants, refused) -> None:
    served = serve()
    durable = served.client.upload("a", variants(0))
    gone = push(served.client, variants(1))
    served.client.upload("alone", variants(2), ephemeral=True)
    served.stop()
    client = serve().client
    # The name means what is left of it.
    assert client.get("a").digest == durable.adapter.digest
    for ref in ("alone", "a@2", gone.adapter.digest):
        with refused("NOT_FOUND", "no adapter"):
            client.get(ref)
    again = push(client, variants(1))
    assert again.adapter.version == 3
    assert again.revision > gone.revision + 1


@pytest.mark.processes
def test_killed_right_after_a_push_nothing_is_half_there(spawn, tmp_path, variants) -> None:
    process = spawn()
    client = Client(process.wait_until_ready()["grpc"])
    revisions = [push(client, variants(number)).revision for number in range(3)]
    process.end(signal.SIGKILL)
    client.close()
    client = Client(spawn().wait_until_ready()["grpc"])
    with pytest.raises(grpc.RpcError) as caught:
        client.get("a")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert on_disk(tmp_path) == []
    done = push(client, variants(1))
    assert done.adapter.version == 4
    assert done.revision > max(revisions)
    client.close()


def test_registered_durably_it_survives(serve, variants) -> None:
    served = serve()
    push(served.client, variants(1), ttl_seconds=60)
    durable = served.client.upload("a", variants(1))
    assert (durable.adapter.version, durable.adapter.ephemeral) == (1, False)
    assert not durable.adapter.HasField("expire_time")
    served.stop()
    found = serve().client.get("a")
    assert (found.digest, found.ephemeral) == (durable.adapter.digest, False)


def test_a_push_that_ends_in_the_middle_leaves_nothing(serve, tmp_path, variants) -> None:
    served = serve()
    files = variants(1)

    def requests():
        yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name="a", ephemeral=True))
        for name, data in files.items():
            half = pb.FileChunk(file_name=name, data=data[: len(data) // 2])
            yield pb.UploadAdapterRequest(chunk=half)

    with pytest.raises(grpc.RpcError) as caught:
        served.client.stub.UploadAdapter(requests())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    until(lambda: not list((tmp_path / "data" / "staging").iterdir()))
    uses = {use.name: use.used for use in served.running.store.use_cases.status.read_work().places}
    assert uses["ephemeral_bytes"] == 0
    assert served.running.store.catalog.history.revision() == 0


def test_more_than_the_memory_for_them_is_refused(serve, variants, refused) -> None:
    files = variants(0)
    size = sum(map(len, files.values()))
    served = serve(ephemeral_memory=int(1.5 * size), **NOW)
    push(served.client, files)
    with refused("RESOURCE_EXHAUSTED", "--ephemeral-memory"):
        push(served.client, variants(1))
    served.client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    uses = served.running.store.use_cases.status.read_work
    until(lambda: not next(u.used for u in uses().places if u.name == "ephemeral_bytes"))
    assert push(served.client, variants(1)).adapter.version == 2


def test_deleted_ones_make_room_before_a_push_is_refused(serve, variants) -> None:
    """Their grace is for requests that have not begun to pull; a trainer does not wait for it."""
    size = sum(map(len, variants(0).values()))
    served = serve(ephemeral_memory=int(2.5 * size), ephemeral_grace_seconds=3600)
    for number in range(4):
        done = push(served.client, variants(number), keep=1)
        assert done.adapter.version == number + 1
    uses = {use.name: use.used for use in served.running.store.use_cases.status.read_work().places}
    assert uses["ephemeral_bytes"] <= 2 * size


def test_what_makes_room_has_no_image_in_memory_any_more(serve, variants, make_layout) -> None:
    size = sum(map(len, variants(0).values()))
    served = serve(ephemeral_memory=int(1.5 * size), ephemeral_grace_seconds=3600)
    served.client.register_layout(make_layout())
    push(served.client, variants(0))
    served.idle()
    served.client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    assert served.running.store.images.memory_counts.images == 1
    push(served.client, variants(1))
    served.idle()
    until(lambda: served.running.store.images.memory_counts.images == 1)


def test_two_pushers_of_one_name_get_a_version_each(serve, variants) -> None:
    served = serve()
    with ThreadPoolExecutor(2) as pool:
        pushes = [pool.submit(push, served.client, variants(number)) for number in range(2)]
        done = [each.result() for each in pushes]
    assert sorted(each.adapter.version for each in done) == [1, 2]
    newest = max(done, key=lambda each: each.revision)
    assert served.client.get("a").digest == newest.adapter.digest


def test_the_pusher_that_is_late_is_told(serve, variants, refused) -> None:
    served = serve()
    first = push(served.client, variants(0))
    push(served.client, variants(1))
    with refused("ABORTED", "if_current_digest"):
        push(served.client, variants(2), if_current_digest=first.adapter.digest)


def test_pinned_and_ephemeral_is_a_contradiction(client, variants, refused) -> None:
    with refused("INVALID_ARGUMENT", "ephemeral"):
        push(client, variants(0), pinned=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(client, variants, value, refused) -> None:
    files = variants(0)
    tensors = load(files[WEIGHTS])
    key = max(tensors)
    tensors[key].view(-1)[-1] = torch.tensor(value)
    with refused("INVALID_ARGUMENT", key):
        push(client, files | {WEIGHTS: save(tensors)})
