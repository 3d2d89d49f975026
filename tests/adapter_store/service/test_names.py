"""Names over a real channel: register, update, roll back, list, pin, delete, watch, upload."""

from __future__ import annotations

import time
from functools import partial
from hashlib import sha256

import grpc
import pytest

from adapter_store.checkpoint.open import open_checkpoint
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.client import refusal_of
from tests.support.wait import until

pytestmark = pytest.mark.slow


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_register_update_and_roll_back(client, make_adapter):
    one, two = make_adapter(folder="one", seed=1), make_adapter(folder="two", seed=2, rank=8)
    first = client.register("team/a", one, labels={"run": "7"})
    assert first.adapter.name == "team/a"
    assert first.adapter.digest == open_checkpoint(one).digest
    assert (first.adapter.version, first.adapter.rank, first.revision) == (1, 4, 1)
    assert list(first.adapter.targets) == ["q_proj", "v_proj"]
    assert first.adapter.base_model == "org/tiny"
    assert first.adapter.source_bytes == (one / "adapter_model.safetensors").stat().st_size
    assert client.register("team/a", one).revision == 1
    second = client.register("team/a", two)
    assert (second.adapter.version, second.revision) == (2, 2)
    assert client.get("team/a").rank == 8
    assert client.get("team/a@1").digest == first.adapter.digest
    back = client.register("team/a", one)
    assert (back.adapter.version, back.revision) == (1, 3)
    assert back.adapter.labels == {"run": "7"}


def test_names_may_have_capitals(client, make_adapter):
    folder, names = make_adapter(), ["default/Qwen-SQL", "default/qwen-sql"]
    for name in reversed(names):
        client.register(name, folder)
    first = client.stub.ListAdapters(pb.ListAdaptersRequest(page_size=1))
    token = first.next_page_token
    second = client.stub.ListAdapters(pb.ListAdaptersRequest(page_size=1, page_token=token))
    assert [page.adapters[0].name for page in (first, second)] == names
    found = client.stub.ListAdapters(pb.ListAdaptersRequest(filter="name=Qw")).adapters
    assert [adapter.name for adapter in found] == names[:1]


def test_versions_and_rollback(client, make_adapter, refused):
    one, two = make_adapter(folder="one", seed=1), make_adapter(folder="two", seed=2)
    first = client.register("team/a", one, description="about refunds").adapter
    second = client.register("team/a", two).adapter
    assert {f.name: (f.size_bytes, f.sha256) for f in first.files} == {
        path.name: (path.stat().st_size, sha256(path.read_bytes()).hexdigest())
        for path in one.iterdir()
    }
    assert first.description == "about refunds"
    assert first.signature_state == pb.SIGNATURE_STATE_UNSIGNED
    client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="team/a", version=1))
    page = client.stub.ListVersions(pb.ListVersionsRequest(name="team/a"))
    assert [v.version for v in page.adapters] == [2, 1]
    assert [v.HasField("delete_time") for v in page.adapters] == [False, True]
    assert (page.current_version, page.revision) == (2, 3)
    ask = pb.RollbackAdapterRequest(name="team/a", version=1, if_current_digest=second.digest)
    back = client.stub.RollbackAdapter(ask)
    assert (back.adapter.digest, back.revision) == (first.digest, 4)
    assert client.get("team/a").description == "about refunds"
    with refused("ABORTED", "if_current_digest"):
        client.stub.RollbackAdapter(ask)
    with refused("NOT_FOUND", "team/a@7"):
        client.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="team/a", version=7))
    with refused("INVALID_ARGUMENT", "version"):
        client.stub.RollbackAdapter(pb.RollbackAdapterRequest(name="team/a"))
    with refused("NOT_FOUND", "team/b"):
        client.stub.ListVersions(pb.ListVersionsRequest(name="team/b"))


def test_registrations_and_calls_delete_old_versions(client, make_adapter, refused):
    folders = [make_adapter(folder=f"f{seed}", seed=seed) for seed in range(5)]
    for folder in folders[:3]:
        made = client.register("team/a", folder, keep=2)
    assert (made.adapter.version, made.deleted_versions) == (3, [1])
    uploaded = client.upload("team/a", files_of(folders[3]), keep=2)
    assert (uploaded.adapter.version, uploaded.deleted_versions) == (4, [2])
    client.register("team/a", folders[4])
    pruned = client.stub.PruneVersions(pb.PruneVersionsRequest(name="team/a", keep=1))
    assert (pruned.deleted_versions, pruned.revision, pruned.has_more) == ([3, 4], 6, False)
    with refused("NOT_FOUND", "team/a@4"):
        client.get("team/a@4")
    assert client.get("team/a").version == 5
    with refused("INVALID_ARGUMENT", "keep"):
        client.stub.PruneVersions(pb.PruneVersionsRequest(name="team/a"))


def test_the_source_is_never_read_again(client, make_adapter, make_layout):
    folder = make_adapter()
    digest = client.register("a", folder).adapter.digest
    (folder / "adapter_model.safetensors").unlink()
    layout_id = client.register_layout(make_layout())
    assert client.pull(digest, layout_id).is_whole


def test_conditions(client, make_adapter, refused):
    one, two = make_adapter(folder="one", seed=1), make_adapter(folder="two", seed=2)
    digests = [open_checkpoint(folder).digest for folder in (one, two)]
    with refused("FAILED_PRECONDITION", "expected_digest", digests[0]):
        client.register("a", one, expected_digest=digests[1])
    with refused("NOT_FOUND"):
        client.get("a")
    client.register("a", one, expected_digest=digests[0])
    with refused("ABORTED", "if_current_digest"):
        client.register("a", two, if_current_digest=digests[1])
    assert client.register("a", two, if_current_digest=digests[0]).adapter.version == 2
    with refused("INVALID_ARGUMENT", "if_current_digest"):
        client.register("a", two, if_current_digest="latest")


def test_upload(client, make_adapter):
    folder = make_adapter()
    files = {**files_of(folder), "README.md": b"hello", "training_args.bin": b"\x80"}
    uploaded = client.upload("up", files, labels={"by": "trainer"}, pinned=True)
    assert uploaded.adapter.digest == open_checkpoint(folder).digest
    assert uploaded.adapter.source_uri == "upload://"
    assert uploaded.adapter.pinned
    assert client.register("up", folder).revision == uploaded.revision


def test_a_malformed_upload_leaves_nothing(client, store, make_adapter, refused, tmp_path):
    files = files_of(make_adapter())
    with refused("INVALID_ARGUMENT", "an upload starts with its meta"):
        client.stub.UploadAdapter(iter([]))
    with refused("INVALID_ARGUMENT", "starts with its meta"):
        client.stub.UploadAdapter(iter([pb.UploadAdapterRequest(chunk=pb.FileChunk())]))
    meta = pb.UploadAdapterRequest(meta=pb.UploadMeta(name="a"))
    with refused("INVALID_ARGUMENT", "only chunks may follow"):
        client.stub.UploadAdapter(iter([meta, meta]))
    with refused("INVALID_ARGUMENT", "../evil"):
        client.upload("a", {**files, "../evil": b"x"})
    chunk = pb.FileChunk(file_name="adapter_config.json", offset=3, data=b"x")
    with refused("INVALID_ARGUMENT", "chunk.offset"):
        client.stub.UploadAdapter(iter([meta, pb.UploadAdapterRequest(chunk=chunk)]))
    with refused("INVALID_ARGUMENT", "adapter_config.json is missing"):
        client.upload("a", {"adapter_model.safetensors": files["adapter_model.safetensors"]})
    until(lambda: not list((tmp_path / "data" / "staging").iterdir()))
    assert list((tmp_path / "data" / "blobs").iterdir()) == []


def test_aborted_upload_leaves_nothing(client, make_adapter, tmp_path):
    staging = tmp_path / "data" / "staging"
    sent = []

    def requests():
        yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name="a"))
        yield pb.UploadAdapterRequest(
            chunk=pb.FileChunk(file_name="adapter_config.json", data=b"{")
        )
        while not sent:
            time.sleep(0.01)

    call = client.stub.UploadAdapter.future(requests())
    until(lambda: list(staging.glob("*/adapter_config.json")))
    call.cancel()
    sent.append(True)
    until(lambda: not list(staging.iterdir()))


def test_delete(client, make_adapter, refused):
    for seed in (1, 2):
        client.register("a", make_adapter(folder=f"f{seed}", seed=seed))
    assert client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a", version=2)).revision == 3
    assert client.get("a").version == 1
    with refused("NOT_FOUND", "default/a@2"):
        client.get("a@2")
    client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    for ref in ("a", "a@1"):
        with refused("NOT_FOUND", "default/a"):
            client.get(ref)
    with refused("NOT_FOUND", "default/a"):
        client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))


def test_pin_and_unpin(client, make_adapter, refused):
    digest = client.register("a", make_adapter()).adapter.digest
    pinned = client.stub.PinAdapter(pb.PinAdapterRequest(ref=digest))
    assert (pinned.adapter.name, pinned.adapter.pinned, pinned.revision) == ("default/a", True, 2)
    assert not client.stub.UnpinAdapter(pb.UnpinAdapterRequest(ref="a@1")).adapter.pinned
    with refused("NOT_FOUND", "default/b"):
        client.stub.PinAdapter(pb.PinAdapterRequest(ref="b"))


def test_lists_are_paged(client, make_adapter, refused):
    folder = make_adapter()
    for i in range(5):
        client.register(f"t/n{i}", folder, labels={"even": str(i % 2 == 0)})
    names, token = [], ""
    while True:
        request = pb.ListAdaptersRequest(page_size=2, page_token=token, filter="label.even=True")
        page = client.stub.ListAdapters(request)
        names += [adapter.name for adapter in page.adapters]
        token = page.next_page_token
        if not token:
            break
    assert names == ["t/n0", "t/n2", "t/n4"]
    assert page.revision == 5
    with refused("INVALID_ARGUMENT", "page_token"):
        client.stub.ListAdapters(pb.ListAdaptersRequest(page_token="x"))
    with refused("INVALID_ARGUMENT", "filter"):
        client.stub.ListAdapters(pb.ListAdaptersRequest(filter="size>3"))


def test_watch_from_the_start_and_live(client, make_adapter):
    one, two = make_adapter(folder="one", seed=1), make_adapter(folder="two", seed=2)
    digest = client.register("a", one).adapter.digest
    watch = client.stub.WatchAdapters(pb.WatchAdaptersRequest())
    first = next(watch).event
    assert (first.revision, first.kind, first.name) == (1, pb.EVENT_KIND_REGISTERED, "default/a")
    assert (first.version, first.digest) == (1, digest)
    client.register("a", two)
    event = next(e.event for e in watch if e.event.kind != pb.EVENT_KIND_BOOKMARK)
    assert (event.revision, event.kind, event.version) == (2, pb.EVENT_KIND_UPDATED, 2)
    client.stub.PinAdapter(pb.PinAdapterRequest(ref="a"))
    client.stub.UnpinAdapter(pb.UnpinAdapterRequest(ref="a"))
    client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    kinds = []
    while len(kinds) < 3:
        event = next(watch).event
        if event.kind != pb.EVENT_KIND_BOOKMARK:
            kinds.append((event.revision, event.kind, event.version))
    assert kinds == [
        (3, pb.EVENT_KIND_PINNED, 2),
        (4, pb.EVENT_KIND_UNPINNED, 2),
        (5, pb.EVENT_KIND_DELETED, 0),
    ]
    watch.cancel()


def test_watch_sends_bookmarks(client, make_adapter):
    client.register("a", make_adapter())
    watch = client.stub.WatchAdapters(pb.WatchAdaptersRequest(since_revision=1))
    event = next(watch).event
    assert (event.kind, event.revision) == (pb.EVENT_KIND_BOOKMARK, 1)
    watch.cancel()


def test_watch_of_another_history(client, refused):
    with refused("OUT_OF_RANGE", "list again"):
        next(client.stub.WatchAdapters(pb.WatchAdaptersRequest(since_revision=5)))


def test_everything_survives_a_restart(serve, make_adapter, make_layout):
    folder = make_adapter()
    store = serve()
    before = store.client.register("a", folder, labels={"x": "y"})
    layout_id = store.client.register_layout(make_layout())
    store.idle()
    image = store.client.pull(before.adapter.digest, layout_id)
    record = store.client.get("a")
    store.stop()
    store = serve()
    assert store.client.get("a") == record
    assert store.client.register("a", folder).revision == before.revision
    assert store.client.register_layout(make_layout()) == layout_id
    assert store.client.pull(before.adapter.digest, layout_id) == image
    status = store.client.stub.GetStoreStatus(pb.GetStoreStatusRequest())
    assert (status.disk.hits, status.disk.misses, status.disk.images) == (1, 0, 1)
    assert (status.adapters, status.layouts, status.revision) == (1, 1, 1)


def test_a_call_whose_caller_leaves_is_still_recorded(client, make_adapter):
    """Registrations are not interrupted: at least once, never half."""
    folder = make_adapter()
    call = client.stub.RegisterAdapter.future(
        pb.RegisterAdapterRequest(name="a", source_uri=f"file://{folder}")
    )
    call.cancel()
    assert client.register("a", folder).adapter.version == 1


BAD_NAMES = ("", "A/a", "a/b/c", "a@1", "x" * 64)
BAD_LABELS = ({"": "x"}, {"a b": "x"}, {'a"b': "x"}, {"a": "b c"}, {"a": "x" * 256}, {"a": "\n"})
TOO_LONG = (
    ("labels", {f"key{number}": "x" for number in range(65)}),
    ("description", "x" * 4097),
    ("base_model", "x" * 513),
    ("default_base_model", "x" * 513),
    ("source_uri", f"file:///{'x' * 2041}"),
)
"""Texts of a registration are kept as long as the version."""


def test_malformed_and_long_texts_are_refused_by_field(client, make_adapter):
    source = make_adapter().as_uri()
    cases = [("name", name) for name in BAD_NAMES]
    cases += [("labels", labels) for labels in BAD_LABELS]
    wrong = []
    for field, value in (*cases, *TOO_LONG):
        request = pb.RegisterAdapterRequest(**{"name": "a", "source_uri": source, field: value})
        said = refusal_of(partial(client.stub.RegisterAdapter, request))
        if not (said.startswith("INVALID_ARGUMENT: ") and field in said):
            wrong.append((field, value, said))
    assert wrong == []


def test_a_base_model_has_to_be_known(client, make_adapter, refused):
    folder = make_adapter(base_model_name_or_path=None)
    with refused("INVALID_ARGUMENT", "base_model"):
        client.register("a", folder)
    assert client.register("a", folder, base_model="org/x").adapter.base_model == "org/x"
    with refused("INVALID_ARGUMENT", "base_model"):
        client.register("a", folder, base_model="x" * 600)


def test_local_path_as_base_model(client, make_adapter, make_layout, refused):
    """The answer says which base model it is, and why."""
    folder = make_adapter(base_model_name_or_path="/mnt/models/llama")
    with refused("INVALID_ARGUMENT", "base_model", "local path", "/mnt/models/llama"):
        client.register("a", folder)
    client.register_layout(make_layout())
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    only = client.upload("a", files)
    assert (only.adapter.base_model, only.adapter.config_base_model) == (
        "org/tiny",
        "/mnt/models/llama",
    )
    assert only.base_model_source == pb.BASE_MODEL_SOURCE_ONLY_SERVED
    assert "the only one" in only.base_model_reason
    client.register_layout(make_layout(base_model="org/other"))
    with refused("INVALID_ARGUMENT", "base_model", "'org/other'", "'org/tiny'"):
        client.register("b", folder)
    again = client.register("a", folder)
    assert (again.adapter.version, again.base_model_source) == (
        1,
        pb.BASE_MODEL_SOURCE_CURRENT_VERSION,
    )
    said = client.register("a", folder, base_model="org/x")
    assert (said.adapter.base_model, said.base_model_source) == (
        "org/x",
        pb.BASE_MODEL_SOURCE_CALLER,
    )


def test_local_path_that_a_server_has(client, make_adapter, make_layout):
    for base_model in ("org/tiny", "org/other"):
        client.register_layout(make_layout(base_model=base_model))
    folder = make_adapter(base_model_name_or_path="/mnt/models/other")
    found = client.register("a", folder)
    assert found.adapter.base_model == "org/other"
    assert found.base_model_source == pb.BASE_MODEL_SOURCE_SERVED
    assert "'/mnt/models/other'" in found.base_model_reason


def test_a_missing_source_is_not_found(client, tmp_path, refused):
    with refused("NOT_FOUND", "source_uri", "nowhere"):
        client.register("a", tmp_path / "nowhere")


def test_a_channel_with_a_deadline_gets_its_answer(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.WatchAdapters(pb.WatchAdaptersRequest(), timeout=0.2).__next__()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
