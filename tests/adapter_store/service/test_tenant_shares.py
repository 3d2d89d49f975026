"""One tenant does its worst to a store as an operator starts it; another is served meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from adapter_store.catalog.tables.lookup import MIN_HIDDEN_MICROS
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.servers.dripping import DrippingServer
from tests.support.store.adapters import HIDDEN, VOCAB, make_large, random_tensors
from tests.support.wait import TIMEOUT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SECONDS = 10.0
"""How long the other tenant's calls may take: not as long as the attacks last."""


@pytest.fixture
def start(spawn, tmp_path):
    """start("[toml]", "--flag", ...): the address of a store with tenants a and b."""

    def start(policy: str = "", *flags: str, **environment: str) -> str:
        path = write_policy(
            tmp_path,
            ROOT,
            token_lines("a", ["publisher", "reader", "server"], ["a"]),
            token_lines("b", ["publisher", "reader", "server"], ["b"]),
            policy,
        )
        process = spawn("--policy-file", str(path), *flags, **environment)
        return process.wait_until_ready()["grpc"]

    return start


@pytest.fixture
def tenants(connect):
    """tenants(address): clients of a and b."""
    return lambda address: [connect(address, token_of(name)) for name in ("a", "b")]


class Trickle:
    """Uploads that send their meta, then empty chunks until they are ended."""

    def __init__(self, client, chunk: bytes = b"") -> None:
        self._client = client
        self._chunk = chunk
        self._over = threading.Event()
        self.calls: list[Any] = []

    def begin(self) -> None:
        name = f"u{len(self.calls)}"
        self.calls.append(self._client.stub.UploadAdapter.future(self._requests(name)))

    def refusals(self) -> list[grpc.RpcError]:
        return [call.exception() for call in self.calls if call.done()]

    def end(self) -> None:
        self._over.set()
        for call in self.calls:
            call.cancel()

    def _requests(self, name: str) -> Iterator[pb.UploadAdapterRequest]:
        yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name=name))
        offset = 0
        while not self._over.wait(0.2):
            chunk = pb.FileChunk(file_name="adapter_config.json", offset=offset, data=self._chunk)
            offset += len(self._chunk)
            yield pb.UploadAdapterRequest(chunk=chunk)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def du(folder: Path) -> int:
    """Bytes under a folder whose files and folders come and go."""
    total = 0
    for root, _, names in os.walk(folder):  # passes over what has gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(root, name))
    return total


def du_at_once(folder: Path) -> int:
    """Does what `du` does, unless anything has gone since it was counted: others may have taken its
    place and be counted, too. Then 0."""

    def folders() -> set[str]:
        return {root for root, _, _ in os.walk(folder)}

    before, total = folders(), du(folder)
    return total if before <= folders() else 0


def test_trickling_uploads_leave_places_to_others(start, tenants, make_adapter) -> None:
    a, b = tenants(start())
    trickle = Trickle(a)
    try:
        for _ in range(64):
            trickle.begin()
        until(lambda: len(trickle.refusals()) == 32)
        for refusal in trickle.refusals():
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "uploads: 32 of 64" in refusal.details()
        assert b.upload("mine", files_of(make_adapter())).adapter.version == 1
    finally:
        trickle.end()


def test_empty_chunks_are_no_progress(start, tenants) -> None:
    a, _ = tenants(start(LOADOUT_STORE_TRANSFER_STALL_SECONDS="1"))
    trickle = Trickle(a)
    try:
        trickle.begin()
        until(lambda: trickle.refusals())
        assert trickle.refusals()[0].code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "min-transfer-rate" in trickle.refusals()[0].details()
    finally:
        trickle.end()


def test_staged_bytes_count_against_the_quota(start, tenants, tmp_path) -> None:
    a, _ = tenants(start('[tenants.a]\nmax_bytes = "1MiB"'))
    most = [0]

    def requests(name: str) -> Iterator[pb.UploadAdapterRequest]:
        yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name=name))
        block = bytes(1 << 18)
        for index in range(64):
            chunk = pb.FileChunk(
                file_name="adapter_model.safetensors", offset=index << 18, data=block
            )
            yield pb.UploadAdapterRequest(chunk=chunk)
            most[0] = max(most[0], du_at_once(tmp_path / "data" / "staging"))

    calls = [a.stub.UploadAdapter.future(requests(f"n{i}")) for i in range(3)]
    for call in calls:
        assert call.exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_bytes" in call.exception().details()
    assert 0 < most[0] <= 2 << 20
    until(lambda: du(tmp_path / "data" / "staging") == 0)


def test_staged_bytes_of_all_are_shared(start, tenants, make_adapter) -> None:
    a, b = tenants(start(LOADOUT_STORE_STAGING_BYTES="4MiB"))
    trickle = Trickle(a, bytes(1 << 19))
    try:
        for _ in range(6):
            trickle.begin()
        until(lambda: trickle.refusals())
        assert "staged_bytes" in trickle.refusals()[0].details()
        assert b.upload("mine", files_of(make_adapter())).adapter.version == 1
    finally:
        trickle.end()


@pytest.fixture
def dripping() -> Iterator[DrippingServer]:
    server = DrippingServer()
    yield server
    server.close()


@pytest.fixture
def start_dripping(start, dripping) -> Callable[..., str]:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    flags = ("--s3-buckets", "bucket", "--s3-endpoint-url", dripping.url)
    return lambda **environment: start("", *flags, **keys, **environment)


def fetch(client, name: str):
    request = pb.RegisterAdapterRequest(name=name, source_uri=f"s3://bucket/{name}")
    return client.stub.RegisterAdapter.future(request)


def test_dripping_sources_leave_workers_to_others(
    start_dripping, tenants, dripping, make_adapter
) -> None:
    a, b = tenants(start_dripping())
    fetches = [fetch(a, f"f{i}") for i in range(2)]
    until(lambda: len(dripping.connections) == 2)
    fetches += [fetch(a, f"f{i}") for i in range(2, 8)]
    start_s = time.monotonic()
    assert b.upload("mine", files_of(make_adapter())).adapter.version == 1
    assert b.register("other", make_adapter(folder="other")).adapter.version == 1
    assert time.monotonic() - start_s < SECONDS
    assert not any(call.done() for call in fetches)
    # A caller that leaves ends its fetch: the next ones get its worker.
    for call in fetches[:2]:
        call.cancel()
    until(lambda: len(dripping.connections) >= 4, SECONDS)
    for call in fetches:
        call.cancel()
    assert a.register("mine", make_adapter(folder="more")).adapter.version == 1


def test_a_source_that_is_too_slow_is_left(start_dripping, tenants) -> None:
    a, _ = tenants(start_dripping(LOADOUT_STORE_TRANSFER_STALL_SECONDS="1"))
    error = fetch(a, "slow").exception(TIMEOUT_S)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "too slow" in error.details()


def test_watches_of_one_tenant_leave_others_theirs(start, tenants) -> None:
    a, b = tenants(start(LOADOUT_STORE_MAX_WATCHES="8"))

    def watch(client):
        stream = client.stub.WatchAdapters(pb.WatchAdaptersRequest())
        next(stream)  # a bookmark
        return stream

    streams = [watch(a) for _ in range(4)]
    with pytest.raises(grpc.RpcError) as refusal:
        watch(a)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "watches: 4 of 8 (setting max-watches)" in refusal.value.details()
    streams.pop(0).cancel()
    streams.append(until(lambda: watch_or_none(watch, a)))
    streams += [watch(b), watch(b)]
    for stream in streams:
        stream.cancel()


def watch_or_none(watch, client):
    with contextlib.suppress(grpc.RpcError):
        return watch(client)


def test_pulls_that_nobody_reads_leave_memory_to_others(
    start, tenants, make_adapter, make_layout
) -> None:
    a, b = tenants(start("", "--image-memory", "80MiB", LOADOUT_STORE_PULL_STALL_SECONDS="600"))
    # Two of some 34 MB fill the memory.
    images = [make_large(a, make_adapter, make_layout, f"n{i}", float(i + 1)) for i in range(2)]
    mine = make_large(b, make_adapter, make_layout, "mine", 9.0)

    def pull(image: tuple[str, str]):
        digest, layout_id = image
        stream = a.stub.PullAdapter(pb.PullAdapterRequest(digest=digest, layout_id=layout_id))
        next(stream)
        return stream

    held = pull(images[0])
    with pytest.raises(grpc.RpcError) as refusal:
        pull(images[1])
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "pulled_bytes" in refusal.value.details()
    again = pull(images[0])  # takes nothing more
    assert b.pull(*mine).is_whole
    held.cancel()
    again.cancel()


def states(adapter: pb.Adapter) -> list[int]:
    return [each.state for each in adapter.layout_states]


def test_content_that_another_tenant_has_looks_as_new(
    start, tenants, make_adapter, make_layout
) -> None:
    a, b = tenants(start())
    digest, layout_id = make_large(a, make_adapter, make_layout)
    until(lambda: states(a.get("large")) == [pb.IMAGE_STATE_READY])
    folder = make_adapter(("embed_tokens",), folder="unused").parent / "large"
    answer = b.register("same", folder)
    assert answer.adapter.digest == digest
    assert states(answer.adapter) == [pb.IMAGE_STATE_PENDING]
    assert states(a.get("large")) == [pb.IMAGE_STATE_READY]
    assert b.pull(digest, layout_id).is_whole
    assert states(b.get("same")) == [pb.IMAGE_STATE_READY]
    assert states(a.get("large")) == [pb.IMAGE_STATE_READY]


def test_incompatible_content_of_another_tenant_looks_as_new(
    start, tenants, make_adapter, make_layout
) -> None:
    a, b = tenants(start(LOADOUT_STORE_COMPILE_AHEAD="false"))  # the verdict comes with a pull
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {key.format("A"): torch.ones(4, 16), key.format("B"): torch.ones(99, 4)}
    folder = make_adapter(("q_proj",), tensors=tensors)
    layout_id = a.register_layout(make_layout())
    registered = a.register("wide", folder).adapter
    digest = registered.digest
    assert states(registered) == [pb.IMAGE_STATE_PENDING]

    def check_refused(client, name: str) -> None:
        with pytest.raises(grpc.RpcError) as refusal:
            client.pull(digest, layout_id)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert states(client.get(name)) == [pb.IMAGE_STATE_INCOMPATIBLE]

    check_refused(a, "wide")
    start_s = time.monotonic()
    of_b = b.register("same", folder).adapter
    # A busy machine may answer after the verdict would have come for new content.
    if time.monotonic() - start_s < MIN_HIDDEN_MICROS / 1e6:
        assert states(of_b) == [pb.IMAGE_STATE_PENDING]
    check_refused(b, "same")


@pytest.mark.parametrize("num_rows", [VOCAB + 2, 3])
def test_a_look_up_tells_not_that_another_tenant_has_the_content(
    start, tenants, make_adapter, make_layout, num_rows: int
) -> None:
    """Of content that adds tokens, and of a head that is none of the layout's: a look-up plans
    both."""
    a, b = tenants(start(LOADOUT_STORE_COMPILE_AHEAD="false"))
    head = {"base_model.model.lm_head.weight": torch.ones(num_rows, HIDDEN)}
    tensors = random_tensors({"model.layers.0.self_attn.q_proj": 4}) | head
    folder = make_adapter(("q_proj",), tensors=tensors, modules_to_save=["lm_head"])
    a.register_layout(dataclasses.replace(make_layout(), image_format=2))
    answers = []
    for client, name in ((a, "fresh"), (b, "known")):
        client.register(name, folder)
        for _ in range(2):
            found = client.get(name)
            answers.append((found.added_tokens, [*found.layout_states]))
    assert answers == answers[:1] * 4
    state = pb.IMAGE_STATE_INCOMPATIBLE if num_rows == 3 else pb.IMAGE_STATE_PENDING
    assert (states(found), found.added_tokens) == ([state], 0 if num_rows == 3 else 2)


def test_layouts_of_one_tenant_leave_others_theirs(start, tenants, make_layout) -> None:
    a, b = tenants(start(LOADOUT_STORE_MAX_LAYOUTS="8"))

    def register(client, number: int) -> str:
        layout = make_layout()
        return client.register_layout(dataclasses.replace(layout, config_sha256=f"{number:064x}"))

    ids = [register(a, number) for number in range(4)]
    with pytest.raises(grpc.RpcError) as refusal:
        register(a, 4)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "setting max-layouts" in refusal.value.details()
    assert register(a, 0) == ids[0]  # known
    assert register(b, 5)
