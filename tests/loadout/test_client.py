"""The blocking client over real channels to real servers of the contract."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

import grpc
import pytest

from loadout import Client, errors, types
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as inference_pb
from tests.support.loadout.server_info import rank_status
from tests.support.wait import TIMEOUT_S


def test_register_by_uri(client, fake_store, registered):
    fake_store.on("RegisterAdapter", registered)
    result = client.register("a", "s3://b/p", labels={"team": "x"}, pinned=True)
    assert (result.adapter.ref, result.revision) == ("default/a@3", 41)
    [request] = fake_store.requests["RegisterAdapter"]
    assert (request.source_uri, request.pinned, dict(request.labels)) == (
        "s3://b/p",
        True,
        {"team": "x"},
    )


def test_keep_and_prune(client, fake_store, registered, adapter_folder):
    fake_store.on("RegisterAdapter", registered)
    uploaded = store_pb.UploadAdapterResponse(deleted_versions=[1, 2])
    fake_store.on("UploadAdapter", uploaded)
    assert client.register("a", "s3://b/p", keep=5).deleted_versions == ()
    assert client.register("a", adapter_folder, keep=4).deleted_versions == (1, 2)
    assert fake_store.requests["RegisterAdapter"][0].keep == 5
    assert fake_store.requests["UploadAdapter"][0][0].meta.keep == 4
    with pytest.raises(errors.InvalidArgument, match="keep must be an integer from 0"):
        client.register("a", "s3://b/p", keep=-1)
    pages = (
        store_pb.PruneVersionsResponse(deleted_versions=[1, 2], has_more=True),
        store_pb.PruneVersionsResponse(deleted_versions=[3], revision=8),
    )
    fake_store.on("PruneVersions", *pages)
    assert client.prune("a", 5) == (1, 2, 3)
    assert [(r.name, r.keep) for r in fake_store.requests["PruneVersions"]] == [("a", 5)] * 2


def test_register_by_folder_uploads(client, fake_store, adapter_folder):
    adapter = store_pb.Adapter(name="default/a", version=1)
    fake_store.on("UploadAdapter", store_pb.UploadAdapterResponse(adapter=adapter, revision=2))
    seen = []
    result = client.register("a", adapter_folder, progress=lambda *sizes: seen.append(sizes))
    assert result.revision == 2
    [messages] = fake_store.requests["UploadAdapter"]
    assert messages[0].meta.name == "a"
    assert seen[-1][0] == seen[-1][1] == sum(len(each.chunk.data) for each in messages[1:])


def test_upload_is_sent_again_after_a_lost_stream(client, fake_store, fail, adapter_folder):
    answer = store_pb.UploadAdapterResponse(revision=2)
    fake_store.on("UploadAdapter", fail(grpc.StatusCode.UNAVAILABLE), answer)
    assert client.register("a", adapter_folder).revision == 2
    first, second = fake_store.requests["UploadAdapter"]
    assert first == second


def test_unreadable_file_is_raised_as_it_is(client, fake_store, adapter_folder):
    fake_store.on("UploadAdapter", store_pb.UploadAdapterResponse())

    def vanish(sent, total):
        (adapter_folder / "adapter_model.safetensors").unlink(missing_ok=True)

    with pytest.raises(FileNotFoundError):
        client.register("a", adapter_folder, progress=vanish)


def test_list_iterates_pages_lazily(client, fake_store):
    def page(names, token):
        adapters = [store_pb.Adapter(name=name) for name in names]
        return store_pb.ListAdaptersResponse(adapters=adapters, next_page_token=token, revision=4)

    fake_store.on("ListAdapters", page(["a", "b"], "t1"), page([], "t2"), page(["c"], ""))
    listing = client.list("tenant=default", page_size=2)
    assert next(listing).name == "a"
    assert len(fake_store.requests["ListAdapters"]) == 1
    assert [adapter.name for adapter in listing] == ["b", "c"]
    sent = [(r.page_size, r.page_token, r.filter) for r in fake_store.requests["ListAdapters"]]
    assert sent == [
        (2, "", "tenant=default"),
        (2, "t1", "tenant=default"),
        (2, "t2", "tenant=default"),
    ]


def test_adapter_is_converted_whole(client, fake_store):
    message = store_pb.Adapter(
        name="default/a",
        version=2,
        digest="sha256:11",
        targets=["k_proj", "q_proj"],
        labels={"team": "x"},
        pinned=True,
        layout_states=[
            store_pb.LayoutState(
                layout_id="l", state=store_pb.IMAGE_STATE_INCOMPATIBLE, reason="r"
            ),
            store_pb.LayoutState(layout_id="m", state=77),
        ],
        files=[store_pb.SourceFile(name="adapter_config.json", size_bytes=3, sha256="ab")],
        signed_by="release",
    )
    message.create_time.FromSeconds(1_700_000_000)
    fake_store.on("GetAdapter", store_pb.GetAdapterResponse(adapter=message))
    adapter = client.get("a")
    assert adapter.targets == ("k_proj", "q_proj")
    assert adapter.create_time == datetime.fromtimestamp(1_700_000_000, UTC)
    assert adapter.update_time is None
    assert adapter.delete_time is None
    assert adapter.files == (types.SourceFile("adapter_config.json", 3, "ab"),)
    assert adapter.signed_by == "release"
    assert [(s.state, s.reason) for s in adapter.layout_states] == [
        (types.ImageState.INCOMPATIBLE, "r"),
        (types.ImageState.UNKNOWN, ""),
    ]


def test_remaining_store_calls(client, fake_store):
    pinned = store_pb.Adapter(name="default/a", pinned=True)
    fake_store.on("PinAdapter", store_pb.PinAdapterResponse(adapter=pinned))
    fake_store.on("UnpinAdapter", store_pb.UnpinAdapterResponse(adapter=store_pb.Adapter()))
    fake_store.on("DeleteAdapter", store_pb.DeleteAdapterResponse(revision=9))
    tier = store_pb.TierStatus(
        used_bytes=1, capacity_bytes=2, images=3, hits=4, misses=5, evictions=6
    )
    fake_store.on("GetStoreStatus", store_pb.GetStoreStatusResponse(version="v", memory=tier))
    assert client.pin("a").pinned
    assert not client.unpin("a").pinned
    assert client.delete("a", 2) == 9
    versions = store_pb.ListVersionsResponse(adapters=[pinned], current_version=3)
    fake_store.on("ListVersions", versions)
    assert [adapter.name for adapter in client.versions("a")] == ["default/a"]
    assert client.version_page("a").current_version == 3
    fake_store.on("RollbackAdapter", store_pb.RollbackAdapterResponse(adapter=pinned, revision=7))
    assert client.rollback("a", 2).revision == 7
    assert fake_store.requests["RollbackAdapter"][0].version == 2
    assert fake_store.requests["DeleteAdapter"][0].version == 2
    status = client.store_status()
    assert status.memory == types.TierStatus(1, 2, 3, 4, 5, 6)
    assert status.disk == types.TierStatus(0, 0, 0, 0, 0, 0)


RESIDENT = inference_pb.ResidentAdapter(
    digest="sha256:11",
    names=["default/a@1"],
    tier=inference_pb.ADAPTER_TIER_DEVICE,
    bytes=9,
    pinned=True,
)


def test_remaining_inference_calls(client, fake_inference):
    fake_inference.on("LoadAdapter", inference_pb.LoadAdapterResponse(adapter=RESIDENT))
    fake_inference.on("PinAdapter", inference_pb.PinAdapterResponse(adapter=RESIDENT))
    fake_inference.on("UnpinAdapter", inference_pb.UnpinAdapterResponse(adapter=RESIDENT))
    fake_inference.on("UnloadAdapter", inference_pb.UnloadAdapterResponse(freed_bytes=512))
    listing = inference_pb.ListResidentAdaptersResponse(adapters=[RESIDENT])
    fake_inference.on("ListResidentAdapters", listing)
    info = inference_pb.GetServerInfoResponse(
        sampling_defaults=inference_pb.SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95),
        base_model="m",
        limits=inference_pb.ServerLimits(max_loras=4),
        memory=[inference_pb.MemoryUse(name="arena", used_bytes=1, capacity_bytes=2)],
        versions={"torch": "2"},
        recurrent_states=inference_pb.RecurrentStates(
            state_bytes=20, interval_tokens=512, capacity=12, max_stored=4, used=2, stored=3
        ),
        weight_formats=[inference_pb.WeightFormat(format="nf4", kernels="triton W4A16")],
        processor=inference_pb.Processor(name="Xeon", num_cores=4, num_processors=8, quota=2.5),
        ranks=[rank_status(1)],
    )
    fake_inference.on("GetServerInfo", info)
    loaded = client.load("a", pin=True)
    assert (loaded.tier, loaded.num_bytes) == (types.AdapterTier.DEVICE, 9)
    assert fake_inference.requests["LoadAdapter"][0].pin
    assert client.pin_resident("a") == client.unpin_resident("a") == loaded
    assert client.unload("a") == 512
    assert client.residents() == (loaded,)
    assert client.server_info().limits.max_loras == 4
    assert client.server_info().sampling_defaults == types.SamplingDefaults(0.6, 20, 0.95)
    assert client.server_info().memory == (types.MemoryUse("arena", 1, 2),)
    assert client.server_info().recurrent_states == types.RecurrentStates(20, 512, 12, 4, 2, 3)
    assert client.server_info().weight_formats == (types.WeightFormat("nf4", "triton W4A16"),)
    assert client.server_info().processor == types.Processor("Xeon", 4, 8, 2.5)
    rank = types.RankStatus(1, 4711, True, 100, 40, 30, 20, 5, 2.0, 0.5, 60, 2, 3, (0, 1, 2, 7))
    assert client.server_info().ranks == (rank,)


def test_inspected_adapter_has_names_for_numbers(client, fake_inference):
    fake_inference.on("LoadAdapter", inference_pb.LoadAdapterResponse(adapter=RESIDENT))
    inspected = inference_pb.InspectAdapterResponse(
        adapter=RESIDENT,
        slot=3,
        extents=[inference_pb.ResidentExtent(offset=256, bytes=512)],
        targets=[
            inference_pb.ResidentTarget(
                name="model.layers.0.mlp.up_proj",
                layer=0,
                kind=store_pb.TARGET_KIND_LINEAR,
                rank=8,
                segments=[
                    inference_pb.ResidentSegment(
                        kind=store_pb.SEGMENT_KIND_A, bytes=100, offset=256
                    ),
                    inference_pb.ResidentSegment(bytes=28, offset=512),
                ],
            ),
            inference_pb.ResidentTarget(name="lm_head"),
        ],
        groups=[
            inference_pb.OperationGroup(name="head", targets=[1], launches=2),
            inference_pb.OperationGroup(name="embed", launches=1),
        ],
        launches=3,
        kernels="triton",
    )
    fake_inference.on("InspectAdapter", inspected)
    a, unknown = types.SegmentKind.A, types.SegmentKind.UNKNOWN
    parts = types.ResidentSegment(a, 100, 256), types.ResidentSegment(unknown, 28, 512)
    linear, other = types.TargetKind.LINEAR, types.TargetKind.UNKNOWN
    targets = (
        types.ResidentTarget("model.layers.0.mlp.up_proj", 0, linear, 8, parts),
        types.ResidentTarget("lm_head", None, other, 0, ()),
    )
    groups = types.OperationGroup("head", ("lm_head",), 2), types.OperationGroup("embed", (), 1)
    extents = (types.ResidentExtent(256, 512),)
    assert client.inspect("a") == types.InspectedAdapter(
        client.load("a"), 3, extents, targets, groups, 3, "triton"
    )
    assert targets[0].num_bytes == 128
    assert fake_inference.requests["InspectAdapter"][0].ref == "a"


def test_generate_streams_typed_chunks(client, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    first, last = client.generate("hi", adapter="a", min_revision=41, max_tokens=3)
    assert (first.text, first.token_ids, first.finish_reason, first.usage) == (
        "he",
        (5, 6),
        None,
        None,
    )
    assert last.finish_reason is types.FinishReason.STOP
    assert last.adapter == types.AdapterIdentity("default/a@3", "sha256:00")
    assert last.timings.first_token_seconds == 0.25
    [request] = fake_inference.requests["Generate"]
    assert (request.adapter, request.min_revision, request.sampling.max_tokens) == ("a", 41, 3)


def test_complete_joins(client, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    completion = client.complete([1, 2], temperature=0)
    assert (completion.text, completion.token_ids) == ("hey", (5, 6, 7))
    assert completion.usage == types.Usage(2, 0, 3)


def test_complete_without_its_end_is_lost(client, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks[:1]))
    with pytest.raises(errors.StreamLost, match="without its last response"):
        client.complete("hi")


@pytest.fixture
def endless(fake_inference, chunks):
    """Generate answers once and then waits for the client to leave."""

    def behave(request, context):
        yield chunks[0]
        while context.is_active():
            time.sleep(0.01)

    fake_inference.on("Generate", behave)
    return fake_inference


def test_break_cancels(client, endless):
    for _ in client.generate("hi"):
        break
    assert endless.cancelled.wait(TIMEOUT_S)


def test_close_cancels_and_ends_the_iteration(client, endless):
    with client.generate("hi") as stream:
        next(stream)
    assert endless.cancelled.wait(TIMEOUT_S)
    assert list(stream) == []


def test_deadline(client, endless):
    started = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        list(client.generate("hi", timeout_s=0.3))
    assert time.monotonic() - started < 15
    assert len(endless.requests["Generate"]) == 1


def test_server_killed_mid_stream_is_lost(client, endless, inference_server):
    stream = client.generate("hi")
    assert next(stream).text == "he"
    threading.Thread(target=inference_server.kill).start()
    with pytest.raises(errors.StreamLost):
        next(stream)
    assert len(endless.requests["Generate"]) == 1


def test_unanswered_generation_moves_to_the_restarted_server(
    fake_inference, start_inference, chunks, quick_retry
):
    first = start_inference()
    arrived = threading.Event()

    def hang(request, context):
        arrived.set()
        while context.is_active():
            time.sleep(0.01)
        return iter(())

    fake_inference.on("Generate", hang, lambda request, context: iter(chunks))

    def restart():
        arrived.wait(TIMEOUT_S)
        first.kill()
        start_inference(first.address)

    restarting = threading.Thread(target=restart)
    restarting.start()
    with Client(inference=first.address, timeout_s=20) as client:
        assert client.complete("hi").text == "hey"
    restarting.join()
    assert len(fake_inference.requests["Generate"]) == 2


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "UNKNOWN"])
def test_lost_after_the_first_response_is_final(client, fake_inference, chunks, fail, code):
    def lose(request, context):
        yield chunks[0]
        fail(grpc.StatusCode[code])(request, context)

    fake_inference.on("Generate", lose)
    stream = client.generate("hi")
    next(stream)
    with pytest.raises(errors.StreamLost):
        next(stream)
    assert list(stream) == []
    assert len(fake_inference.requests["Generate"]) == 1


def test_queue_full_is_honoured(client, fake_inference, fail, chunks):
    full = fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.2)
    fake_inference.on("Generate", full, lambda request, context: iter(chunks))
    started = time.monotonic()
    assert client.complete("hi").text == "hey"
    assert time.monotonic() - started >= 0.2


def test_idempotent_call_survives_lost_answers(client, fake_store, fail):
    lost = [fail(grpc.StatusCode[code]) for code in ("UNAVAILABLE", "INTERNAL", "UNKNOWN")]
    fake_store.on(
        "GetAdapter", *lost, store_pb.GetAdapterResponse(adapter=store_pb.Adapter(rank=4))
    )
    assert client.get("a").rank == 4


def test_attempts_are_bounded(client, fake_store, fail):
    fake_store.on("GetAdapter", fail(grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(errors.StreamLost):
        client.get("a")
    assert len(fake_store.requests["GetAdapter"]) == 4


def test_watch_resumes_where_it_was(client, fake_store, fail):
    def event(revision):
        inner = store_pb.AdapterEvent(revision=revision, kind=store_pb.EVENT_KIND_UPDATED, name="n")
        return store_pb.WatchAdaptersResponse(event=inner)

    def first(request, context):
        yield event(6)
        yield event(7)
        fail(grpc.StatusCode.UNAVAILABLE)(request, context)

    too_old = fail(grpc.StatusCode.OUT_OF_RANGE, "REVISION_TOO_OLD")
    fake_store.on("WatchAdapters", first, lambda request, context: iter([event(8)]), too_old)
    with client.watch(5) as events:
        assert [each.revision for each in events] == [6, 7, 8]
    assert [r.since_revision for r in fake_store.requests["WatchAdapters"]] == [5, 7]
    with pytest.raises(errors.OutOfRange):
        next(client.watch(1))


def test_server_not_there(quick_retry):
    with Client(store="127.0.0.1:1", retry=quick_retry) as client, pytest.raises(errors.StreamLost):
        client.get("a")


def test_service_without_address():
    with Client(inference="127.0.0.1:1") as client:
        with pytest.raises(errors.InvalidArgument, match="the adapter store has no address"):
            client.get("a")
        with pytest.raises(errors.InvalidArgument, match="store='host:port'"):
            client.watch()
