"""What operators rely on: health, reflection, metrics, an orderly end, and a disorderly one."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from adapter_store.__main__ import _run as run_process
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.config import StoreSettings
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.served import Served, read_metrics
from tests.support.wait import until

pytestmark = pytest.mark.slow

SERVICE = "loadout.adapter_store.v1.AdapterStoreService"


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health(client, service):
    stub = health_pb2_grpc.HealthStub(client.channel)
    response = stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(client):
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_metrics(store, client, make_adapter, make_layout, refused):
    folder = make_adapter()
    digest = client.register("a", folder).adapter.digest
    with refused("NOT_FOUND"):
        client.register("b", folder / "nowhere")
    with refused("INVALID_ARGUMENT"):
        client.get("No Name")
    layout_id = client.register_layout(make_layout())
    store.idle()
    image = client.pull(digest, layout_id)
    client.pull(digest, layout_id)
    found = read_metrics(store)
    assert found["registrations_total", "ok"] == 1
    assert found["registrations_total", "source_not_found"] == 1
    assert found["registrations_total", "digest_mismatch"] == 0, "so that the first is an increase"
    assert found["requests_total", "NOT_FOUND", "RegisterAdapter"] == 1
    methods = pb.DESCRIPTOR.services_by_name["AdapterStoreService"].methods_by_name
    for code in ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"):
        assert all(found["requests_total", *sorted((code, method))] == 0 for method in methods)
    assert found["rejections_total", "PERMISSION_DENIED", "PullAdapter"] == 0
    assert found["rejections_total", "RegisterAdapter", "SOURCE_NOT_FOUND"] == 1
    assert found["rejections_total", "GetAdapter", "INVALID_ARGUMENT"] == 1
    assert found["requests_total", "OK", "PullAdapter"] == 2
    assert found["fetched_bytes_total",] == sum(p.stat().st_size for p in folder.iterdir())
    assert found["compiles_total", "ready"] == 1
    assert found["compile_seconds_count",] == 1
    assert found["pulls_total", "complete"] == 2
    assert found["pull_wait_seconds_count",] == 2
    assert found["images_in_progress",] <= 1, "at most its successor's memory is being made ready"
    assert found["images_waiting_for_room",] == 0
    places = {key[1] for key in found if key[0] == "place_capacity"}
    assert places == {
        *("calls", "fetch_workers", "fetches", "interrupts", "uploads", "watches"),
        *("pulled_bytes", "staged_bytes", "compile_workers", "images_waiting_for_memory"),
        *("request_bytes", "answer_bytes", "parse", "ephemeral_bytes"),
    }
    for place in places:
        assert found["place_used", place] <= found["place_capacity", place]
        assert found["place_waiting", place] == found["place_refusals_total", place] == 0
    assert found["tier_evictions_total", "disk", "room"] == 0
    assert found["pulled_bytes_total",] == 2 * len(image.data)
    hits = found["tier_hits_total", "memory"] + found["tier_hits_total", "disk"]
    misses = found["tier_misses_total", "disk"]
    assert (hits, misses) == (2, 0)
    assert found["tier_used_bytes", "memory"] == len(image.data)
    assert found["tier_images", "disk"] == 1
    assert (found["adapters",], found["layouts",], found["revision",]) == (1, 1, 1)
    assert 0 < found["volume_free_bytes",] < found["volume_capacity_bytes",]


def test_address_in_use_is_an_error(serve, client, tmp_path):
    with pytest.raises(OSError, match="cannot listen on"):
        serve(listen=client.address, data_dir=tmp_path / "other")


def test_draining_ends_watches_and_lets_pulls_finish(store, make_adapter, make_layout):
    client = store.client
    digest = client.register("a", make_adapter()).adapter.digest
    layout_id = client.register_layout(make_layout())
    watch = client.stub.WatchAdapters(pb.WatchAdaptersRequest(since_revision=1))
    assert next(watch).event.kind == pb.EVENT_KIND_BOOKMARK
    stream = client.stub.PullAdapter(pb.PullAdapterRequest(digest=digest, layout_id=layout_id))
    next(stream)
    store.begin_stop()
    with pytest.raises(grpc.RpcError) as caught:
        for _ in watch:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [response.WhichOneof("part") for response in stream][-1] == "trailer"
    store.stop()


@pytest.mark.processes
def test_sigterm_under_load_answers_every_call_and_exits_0(
    spawn, connect, make_adapter, make_layout
):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(4)]
    process = spawn()
    client = connect(process.wait_until_ready()["grpc"])
    layout_id = client.register_layout(make_layout())
    digest = client.register("a", folders[0]).adapter.digest
    codes: list[str] = []
    whole: list[bool] = []
    stop = threading.Event()

    def load(thread: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            try:
                if thread % 2:
                    whole.append(client.pull(digest, layout_id).is_whole)
                else:
                    client.register(f"n{thread}", folders[i % 4])
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
                return

    threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: len(codes) >= 6 and whole)
    status, log = process.end(signal.SIGTERM)
    stop.set()
    for thread in threads:
        thread.join()
    assert status == 0, log
    assert set(codes) <= {"OK", "UNAVAILABLE"}
    assert codes.count("UNAVAILABLE") <= 6
    assert whole
    assert all(whole)
    messages = [json.loads(line)["message"] for line in log.splitlines()]
    assert messages[0] == "serving"
    assert messages[-1] == "stopped"
    assert "call failed" not in messages


@pytest.mark.processes
def test_later_sigterms_change_nothing(spawn):
    """Supervisors send them while a process is ending, and one must not kill it then."""
    process = spawn()
    process.wait_until_ready()
    until(lambda: process.process.send_signal(signal.SIGTERM) or process.process.poll() is not None)
    assert process.process.wait() == 0


@pytest.mark.processes
def test_kill_9_while_registering_leaves_the_catalog_intact(
    spawn, connect, make_adapter, make_layout, tmp_path
):
    """ai-dynamo/dynamo#11163: a record and its event are one commit. What was interrupted may be
    registered again, and those that watch hear of it."""
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(8)]
    digests = {open_checkpoint(folder).digest for folder in folders}
    answered: dict[str, tuple[str, int]] = {}
    is_answered = threading.Event()
    for delay, after_an_answer in ((0.05, False), (0.15, False), (0.1, True)):
        process = spawn()
        client = connect(process.wait_until_ready()["grpc"])
        layout_id = client.register_layout(make_layout())
        kill = process.process.kill

        def kill_later(delay=delay, after_an_answer=after_an_answer, kill=kill) -> None:
            if after_an_answer:
                is_answered.wait(60)
            time.sleep(delay)
            kill()

        killer = threading.Thread(target=kill_later)
        killer.start()

        def register(thread: int, client=client) -> None:
            i = 0
            while True:
                i += 1
                name = f"n{thread}"
                try:
                    made = client.register(name, folders[(i + thread) % 8])
                except grpc.RpcError:
                    return
                answered[f"default/{name}"] = (made.adapter.digest, made.revision)
                is_answered.set()

        threads = [threading.Thread(target=register, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        killer.join()
        process.process.wait()
    process = spawn()
    client = connect(process.wait_until_ready()["grpc"])
    adapters = list(client.stub.ListAdapters(pb.ListAdaptersRequest()).adapters)
    revision = client.stub.GetStoreStatus(pb.GetStoreStatusRequest()).revision
    assert answered
    assert set(answered) <= {adapter.name for adapter in adapters}
    # What was answered is in the history; the name may have moved on by one unanswered call.
    assert max(revision_of for _, revision_of in answered.values()) <= revision
    watch = client.stub.WatchAdapters(pb.WatchAdaptersRequest())
    events = [next(watch).event for _ in range(revision)]
    watch.cancel()
    assert [event.revision for event in events] == list(range(1, revision + 1))
    for name, (digest, revision_of) in answered.items():
        assert (events[revision_of - 1].name, events[revision_of - 1].digest) == (name, digest)
    for adapter in adapters:
        assert adapter.digest in digests
        assert client.pull(adapter.digest, layout_id).is_whole
    assert list((tmp_path / "data" / "staging").iterdir()) == []
    assert process.end(signal.SIGTERM)[0] == 0


@pytest.mark.usefixtures("own_threads")
def test_start_failure_is_one_line(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        problems = [
            (
                {"listen": address},
                f"loadout: --listen: cannot listen on {address}: it is already in use",
            ),
            ({"data_dir": blocked}, os.fspath(blocked)),
        ]
        for settings, expected in problems:
            ready_file = tmp_path / "ready.json"
            values = {
                "listen": "127.0.0.1:0",
                "metrics_listen": "127.0.0.1:0",
                "data_dir": tmp_path / "data",
                "ready_file": ready_file,
                **settings,
            }
            assert run_process(StoreSettings(**values)) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("loadout: ")
            assert expected in line
            assert not ready_file.exists()


@pytest.mark.parametrize("removed", ["lock", "nothing"])
@pytest.mark.usefixtures("own_threads")
def test_second_store_on_a_folder_leaves_the_first_ones_ready_file(tmp_path, capsys, removed):
    """Whatever is removed in the folder, which is locked itself."""
    ready_file = tmp_path / "ready.json"
    settings = StoreSettings(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        data_dir=tmp_path / "data",
        ready_file=ready_file,
    )
    first = Served(settings)
    try:
        ready_file.write_text("the first one's")
        (tmp_path / "data" / removed).unlink(missing_ok=True)
        assert run_process(settings) == 1
        assert "another store is using" in capsys.readouterr().err
        assert ready_file.read_text() == "the first one's"
    finally:
        first.stop()
