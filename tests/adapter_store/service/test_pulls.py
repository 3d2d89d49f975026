"""Images over a real channel."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import compile_image
from adapter_store.images.pull import part_messages
from contract.images.dtypes import DataType
from contract.images.targets import Target, TargetKind
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.adapters import make_large
from tests.support.store.served import read_metrics
from tests.support.wait import until

pytestmark = pytest.mark.slow

MODULES = ("q_proj", "v_proj", "down_proj")


@pytest.fixture
def adapter(client, make_adapter, make_layout):
    """(digest, layout_id, the image as compiled here)"""
    folder = make_adapter(MODULES)
    digest = client.register("a", folder).adapter.digest
    expected = compile_image(open_checkpoint(folder), make_layout())
    return digest, client.register_layout(make_layout()), expected


def test_complete_image(client, adapter):
    digest, layout_id, expected = adapter
    pulled = client.pull(digest, layout_id)
    assert pulled.is_whole
    assert pulled.data == bytes(expected.buffer.numpy().data)
    assert pulled.part_ends == [part.end for part in expected.parts]
    header = pulled.header
    assert (header.digest, header.layout_id) == (digest, layout_id)
    assert (header.image_id, header.image_format) == (expected.plan.image_id, 1)
    assert header.total_bytes == len(pulled.data)
    segment = header.segments[1]
    assert (segment.kind, segment.rank, segment.offset % 256) == (pb.SEGMENT_KIND_B, 4, 0)


def test_resume_at_any_offset_of_the_same_image(client, adapter):
    digest, layout_id, _ = adapter
    whole = client.pull(digest, layout_id)
    total = len(whole.data)
    for offset in {0, 1, 255, whole.part_ends[0], whole.part_ends[0] + 1, total - 1, total}:
        rest = client.pull(digest, layout_id, offset, whole.header.image_id)
        assert rest.header.offset == offset
        assert rest.is_whole
        assert rest.data == whole.data[offset:]
        assert rest.part_ends == [end for end in whole.part_ends if end > offset]


def test_another_image_starts_again_at_0(client, adapter):
    digest, layout_id, _ = adapter
    whole = client.pull(digest, layout_id)
    for image_id in ("", "sha256:" + "00" * 32):
        again = client.pull(digest, layout_id, 300, image_id)
        assert (again.header.offset, again.data) == (0, whole.data)


def test_layouts_get_images_of_their_own(client, make_adapter, make_layout):
    digest = client.register("a", make_adapter(MODULES)).adapter.digest
    images = {
        dtype: client.pull(digest, client.register_layout(make_layout(dtype)))
        for dtype in DataType
        if dtype.is_computable
    }
    sizes = {dtype: image.header.total_bytes for dtype, image in images.items()}
    assert sizes[DataType.FLOAT16] == sizes[DataType.BFLOAT16] < sizes[DataType.FLOAT32]
    assert len({image.header.image_id for image in images.values()}) == 3


def test_registering_a_layout_again_is_the_same(client, make_layout):
    assert client.register_layout(make_layout()) == client.register_layout(make_layout())


def test_images_are_precompiled(store, client, make_adapter, make_layout):
    client.register("before", make_adapter(folder="one", seed=1))
    layout_id = client.register_layout(make_layout())
    client.register("after", make_adapter(folder="two", seed=2))
    store.idle()
    for name in ("before", "after"):
        (state,) = client.get(name).layout_states
        assert (state.layout_id, state.state) == (layout_id, pb.IMAGE_STATE_READY)
        assert state.image_bytes > 0
    status = client.stub.GetStoreStatus(pb.GetStoreStatusRequest())
    assert (status.disk.images, status.memory.hits, status.disk.hits) == (2, 0, 0)


def test_no_common_image_format(client, make_layout, refused):
    for formats in ([], [98, 99]):
        message = pb.ModelLayout(base_model="x", dtype=1, image_formats=formats)
        with refused("FAILED_PRECONDITION", "image_formats"):
            client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=message))


def test_malformed_layouts_name_the_field(client, refused):
    target = pb.Target(name="q", group="g", kind=1, in_features=4, out_features=4)
    good = pb.ModelLayout(
        base_model="x", dtype=1, image_formats=[1], config_sha256="0" * 64, targets=[target]
    )
    client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=good))
    for field, value in (("base_model", ""), ("config_sha256", "z"), ("dtype", 0)):
        bad = pb.ModelLayout()
        bad.CopyFrom(good)
        setattr(bad, field, value)
        with refused("INVALID_ARGUMENT", f"layout.{field}"):
            client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=bad))
    bad = pb.ModelLayout()
    bad.CopyFrom(good)
    bad.targets[0].in_features = 0
    with refused("INVALID_ARGUMENT", "layout.targets[0].in_features"):
        client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=bad))


def test_what_cannot_be_pulled(client, adapter, make_adapter, make_layout, refused):
    digest, layout_id, _ = adapter
    other = "sha256:" + "00" * 32
    with refused("NOT_FOUND", f"no adapter {other}"):
        client.pull(other, layout_id)
    with refused("NOT_FOUND", f"no layout {other}"):
        client.pull(digest, other)
    with refused("INVALID_ARGUMENT", "digest"):
        client.pull("a", layout_id)
    with refused("INVALID_ARGUMENT", "layout_id"):
        client.pull(digest, "")
    whole = client.pull(digest, layout_id)
    with refused("INVALID_ARGUMENT", "offset"):
        client.pull(digest, layout_id, len(whole.data) + 1, whole.header.image_id)
    with refused("FAILED_PRECONDITION", "org/other"):
        client.pull(digest, client.register_layout(make_layout(base_model="org/other")))


def test_incompatible_has_a_reason(store, client, make_adapter, make_layout, refused):
    narrow = tuple(
        Target(t.name, t.layer, t.group, TargetKind.LINEAR, t.in_features, 99)
        if t.name.endswith("layers.1.self_attn.q_proj")
        else t
        for t in make_layout().targets
    )
    layout_id = client.register_layout(make_layout(targets=narrow))
    digest = client.register("a", make_adapter()).adapter.digest
    store.idle()
    (state,) = client.get("a").layout_states
    assert state.state == pb.IMAGE_STATE_INCOMPATIBLE
    assert "layers.1.self_attn.q_proj" in state.reason
    with refused("FAILED_PRECONDITION", state.reason):
        client.pull(digest, layout_id)


def test_deleted_digests_are_pullable_through_the_grace(
    serve, make_adapter, make_layout, refused, tmp_path, monkeypatch
):
    store = serve(collect_seconds=0.1)
    client = store.client
    digest = client.register("a", make_adapter()).adapter.digest
    layout_id = client.register_layout(make_layout())
    client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    with refused("NOT_FOUND"):
        client.get(digest)
    assert client.pull(digest, layout_id).is_whole
    catalog = store.running.store.catalog
    monkeypatch.setattr(catalog.times, "now", lambda: datetime.now(UTC) + timedelta(days=1))
    until(lambda: not list((tmp_path / "data" / "blobs").iterdir()))
    with refused("NOT_FOUND"):
        client.pull(digest, layout_id)


@pytest.fixture
def large(client, make_adapter, make_layout):
    return make_large(client, make_adapter, make_layout)


def held(store) -> int:
    """Bytes that are being read or made."""
    return store.running.store.images._memory._held_bytes


def test_a_cancelled_pull_releases_its_image(store, client, large):
    digest, layout_id = large
    stream = client.stub.PullAdapter(pb.PullAdapterRequest(digest=digest, layout_id=layout_id))
    header = next(stream).header
    assert held(store) == header.total_bytes
    assert client.stub.GetStoreStatus(pb.GetStoreStatusRequest()).active_pulls == 1
    stream.cancel()
    until(lambda: held(store) == 0)
    store.run(store.running.store.images.wait_idle())
    status = client.stub.GetStoreStatus(pb.GetStoreStatusRequest())
    assert status.active_pulls == 0
    store.running.store.images.check_integrity()


def test_stalled_reader_gets_a_limited_number_of_bytes(client, large, monkeypatch):
    digest, layout_id = large
    sent_bytes = [0]

    def counted(*part: Any) -> Iterator[Any]:
        for message in part_messages(*part):
            yield message
            sent_bytes.append(sent_bytes[-1] + len(getattr(message, "data", b"")))

    monkeypatch.setattr("adapter_store.images.pull.part_messages", counted)
    stream = client.stub.PullAdapter(pb.PullAdapterRequest(digest=digest, layout_id=layout_id))
    header = next(stream).header
    readings = []

    def has_stopped() -> bool:
        readings.append(sent_bytes[-1])
        return readings[-1] > 0 and readings[-30:] == readings[-1:] * 30

    until(has_stopped)
    assert sent_bytes[-1] < header.total_bytes / 2
    received = sum(len(r.chunk.data) for r in stream)
    assert received == header.total_bytes


def test_a_client_that_vanishes_releases_its_image(store, client, large):
    digest, layout_id = large
    channel = grpc.insecure_channel(client.address)
    pull = channel.unary_stream(
        "/loadout.adapter_store.v1.AdapterStoreService/PullAdapter",
        request_serializer=pb.PullAdapterRequest.SerializeToString,
        response_deserializer=pb.PullAdapterResponse.FromString,
    )
    stream = pull(pb.PullAdapterRequest(digest=digest, layout_id=layout_id))
    next(stream)
    channel.close()
    until(lambda: held(store) == 0)


def test_many_pulls_at_once_while_names_change(client, make_adapter, make_layout):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(4)]
    layout_id = client.register_layout(make_layout())
    digests = [client.register("a", folder).adapter.digest for folder in folders]
    expected = {
        digest: bytes(compile_image(open_checkpoint(folder), make_layout()).buffer.numpy().data)
        for digest, folder in zip(digests, folders, strict=True)
    }
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for folder in folders:
                client.register("a", folder)

    with ThreadPoolExecutor(9) as pool:
        churning = pool.submit(churn)
        pulls = [pool.submit(client.pull, digests[i % 4], layout_id) for i in range(40)]
        results = [pull.result() for pull in pulls]
        done.set()
        churning.result()
    for i, result in enumerate(results):
        assert result.data == expected[digests[i % 4]]


def test_a_reader_that_stops_is_dropped(serve, make_adapter, make_layout, refused):
    store = serve(pull_stall_seconds=0.3)
    digest, layout_id = make_large(store.client, make_adapter, make_layout)
    request = pb.PullAdapterRequest(digest=digest, layout_id=layout_id)
    stream = store.client.stub.PullAdapter(request)
    header = next(stream).header
    until(lambda: read_metrics(store).get(("pulls_total", "cancelled")) == 1)
    store.run(store.running.store.images.wait_idle())
    assert held(store) == 0
    received = 0
    with refused("DEADLINE_EXCEEDED", "0.3 seconds"):
        for response in stream:
            assert response.WhichOneof("part") != "trailer"
            received += len(response.chunk.data)
    assert received < header.total_bytes
    store.stop()
    patient = serve(pull_stall_seconds=60)  # on a busy machine any reader stops that long
    assert patient.client.pull(digest, layout_id).is_whole


def test_a_slow_reader_is_not_dropped(serve, make_adapter, make_layout):
    store = serve(pull_stall_seconds=1.5)
    digest, layout_id = make_large(store.client, make_adapter, make_layout)
    request = pb.PullAdapterRequest(digest=digest, layout_id=layout_id)
    began = time.monotonic()
    kinds = []
    for response in store.client.stub.PullAdapter(request):
        kinds.append(response.WhichOneof("part"))
        time.sleep(0.03)  # what makes it slow
    assert kinds[-1] == "trailer"
    assert time.monotonic() - began > 1.5


def test_full_memory_answers_with_a_retry_time(serve, make_adapter, make_layout, refused):
    store = serve(image_memory=40 << 20)
    store.running.store.images.memory_wait_seconds = 0.05
    first = make_large(store.client, make_adapter, make_layout)
    second = make_large(store.client, make_adapter, make_layout, "second", 2.0)
    store.idle()
    stream = store.client.stub.PullAdapter(
        pb.PullAdapterRequest(digest=first[0], layout_id=first[1])
    )
    next(stream)
    with refused("RESOURCE_EXHAUSTED", "memory") as caught:
        store.client.pull(*second)
    details = [detail.type_url for detail in rpc_status.from_call(caught.error).details]
    assert any(url.endswith("RetryInfo") for url in details)
    assert list(stream)[-1].WhichOneof("part") == "trailer"
    assert store.client.pull(*second).is_whole
