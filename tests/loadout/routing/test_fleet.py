"""Both clients before several replicas, over real channels."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import grpc.aio
import pytest

from loadout import Client, errors
from loadout._routing import addresses
from loadout._routing.metadata import ADAPTER_HEADER
from loadout._routing.replicas import Endpoint, rank
from loadout.inference.v1 import inference_pb2 as pb
from tests.loadout.fakes import RETRY, Asynchronous, Blocking, FakeReplica
from tests.support.wait import TIMEOUT_S

NAMES = [f"a{number}" for number in range(12)]


@pytest.fixture
def fleet() -> Iterator[dict[str, FakeReplica]]:
    """Three replicas by address."""
    made = [FakeReplica() for _ in range(3)]
    yield {each.address: each for each in made}
    for each in made:
        each.kill()


@pytest.fixture(params=[Blocking, Asynchronous], ids=["blocking", "async"])
def connect(request, fleet) -> Iterator[Callable[..., Blocking | Asynchronous]]:
    """A client of all of them."""
    with contextlib.ExitStack() as stack:

        def make(*targets, **options):
            client = request.param(*(targets or fleet), **options)
            stack.callback(client.close)
            return client

        yield make


def home(fleet, name, tenant="default"):
    return rank(fleet, f"{tenant}/{name}")


def ask(client, adapter=""):
    """Who has generated."""
    return client.call("complete", "hi", adapter=adapter).text


def until(client, condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition({each.address: each for each in client.replicas()}):
        assert time.monotonic() < deadline, client.replicas()
        client.pause()


def test_an_adapter_stays_where_it_is_however_it_is_written(fleet, connect):
    client = connect()
    for name in NAMES:
        first = home(fleet, name)[0]
        for ref in (name, f"{name}@2", f"default/{name}"):
            assert ask(client, ref) == first
        client.call("load", name)
        client.call("pin_resident", f"{name}@1")
        client.call("unpin_resident", name)
        assert fleet[first].keys[-6:] == [f"default/{name}"] * 6
        client.call("unload", name)
        assert fleet[first].service.requests["UnloadAdapter"][-1].ref == name


def test_the_tenant_is_part_of_the_key(fleet, connect):
    client = connect(tenant="team-a")
    first = home(fleet, "a1", "team-a")[0]
    assert ask(client, "a1") == ask(client, "team-a/a1") == first
    assert fleet[first].keys == ["team-a/a1"] * 2


def test_without_an_adapter_there_is_no_key_and_the_least_loaded_is_asked(fleet, connect):
    client = connect()
    busy, idle, other = fleet
    fleet[busy].tell_load(50)
    fleet[idle].tell_load(1)
    fleet[other].tell_load(20)
    until(client, lambda known: [known[each].num_requests for each in fleet] == [50, 1, 20])
    assert ask(client) == idle
    assert client.call("server_info").base_model == idle
    assert fleet[idle].keys == [None, None]


def test_a_hot_adapter_spills_over_by_published_load_and_its_operations_do_not(fleet, connect):
    client = connect()
    first, second, _ = home(fleet, "hot")
    fleet[first].tell_load(60)
    until(client, lambda known: known[first].num_requests == 60)
    assert ask(client, "hot") == second
    client.call("load", "hot")
    assert fleet[first].keys == ["default/hot"]


def test_own_calls_in_progress_count(fleet, connect):
    client = connect()
    for each in fleet.values():
        each.tell_load(0, max_sequences=8)
        each.hold.clear()
    until(client, lambda known: all(each.max_sequences == 8 for each in known.values()))
    first, second, _ = home(fleet, "hot")
    started = [client.start("hot") for _ in range(6)]
    texts = [text for _, text in started]
    assert texts.count(first) == 3
    assert texts.count(second) == 3
    for each in fleet.values():
        each.hold.set()
    for stream, _ in started:
        client.finish(stream)
    until(client, lambda known: not any(each.num_requests for each in known.values()))


def test_a_stream_that_is_left_is_not_counted_any_more(fleet, connect):
    client = connect()
    for each in fleet.values():
        each.hold.clear()
    stream, text = client.start("a1")
    assert {each.address: each.num_requests for each in client.replicas()}[text] == 1
    stream.close()
    assert not any(each.num_requests for each in client.replicas())


def test_only_the_keys_of_a_dead_replica_move_and_they_come_back(fleet, connect):
    client = connect()
    before = {name: ask(client, name) for name in NAMES}
    dead = before[NAMES[0]]
    fleet[dead].kill()
    for name in NAMES:
        order = home(fleet, name)
        assert ask(client, name) == (order[1] if order[0] == dead else order[0])
    assert {each.address for each in client.replicas() if not each.is_healthy} == {dead}
    fleet[dead].start()
    until(client, lambda known: known[dead].is_healthy)
    assert {name: ask(client, name) for name in NAMES} == before


def test_a_replica_that_drains_loses_its_keys_and_keeps_its_streams(fleet, connect, fail):
    client = connect()
    first, second, _ = home(fleet, "a1")
    fleet[first].hold.clear()
    stream, _ = client.start("a1")
    draining = fail(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_after_s=30.0)
    fleet[first].service.on("Generate", draining)
    fleet[first].drain()
    began_s = time.monotonic()
    assert ask(client, "a1") == second
    assert time.monotonic() - began_s < 15, "nothing to wait for: another one serves"
    until(client, lambda known: not known[first].is_healthy)
    fleet[first].hold.set()
    client.finish(stream)


def test_a_replica_that_is_silent_is_out_until_it_speaks(fleet, connect, monkeypatch):
    monkeypatch.setattr("loadout._routing.fleet.PROBE_TIMEOUT_S", 1.0)
    first, second, _ = home(fleet, "a1")
    speaks = threading.Event()
    check = fleet[first].health.Check

    def silent(request, context):
        speaks.wait(TIMEOUT_S)
        return check(request, context)

    monkeypatch.setattr(fleet[first].health, "Check", silent)
    fleet[first].kill()
    fleet[first].start()
    client = connect()
    until(client, lambda known: not known[first].is_healthy)
    assert ask(client, "a1") == second
    speaks.set()
    until(client, lambda known: known[first].is_healthy)
    assert ask(client, "a1") == first


def test_what_is_full_sends_on_at_once_and_stays_in(fleet, connect, fail):
    client = connect()
    first, second, _ = home(fleet, "a1")
    full = fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=30.0)
    fleet[first].service.on("Generate", full)
    assert ask(client, "a1") == second
    assert all(each.is_healthy for each in client.replicas())


def test_when_all_are_full_the_answer_says_so(fleet, connect, fail):
    client = connect()
    for each in fleet.values():
        full = fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=30.0)
        each.service.on("Generate", full)
    with pytest.raises(errors.ResourceExhausted):
        ask(client, "a1")
    assert [len(each.service.requests["Generate"]) for each in fleet.values()] == [1, 1, 1]


def test_a_generation_that_has_begun_is_not_sent_to_another(fleet, connect):
    client = connect()
    first = home(fleet, "a1")[0]
    fleet[first].hold.clear()
    stream, _ = client.start("a1")
    fleet[first].kill()
    with pytest.raises(errors.StreamLost):
        client.finish(stream)
    assert sum(len(each.keys) for each in fleet.values()) == 1


def test_what_may_not_be_repeated_is_not(fleet, connect, fail):
    client = connect()
    first = home(fleet, "a1")[0]
    fleet[first].service.on("UnloadAdapter", fail(grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(errors.StreamLost):
        client.call("unload", "a1")
    others = [each for address, each in fleet.items() if address != first]
    assert not any("UnloadAdapter" in each.service.requests for each in others)


def test_an_answer_of_the_service_is_final(fleet, connect, fail):
    client = connect()
    first = home(fleet, "a1")[0]
    missing = fail(grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    fleet[first].service.on("Generate", missing)
    with pytest.raises(errors.NotFound):
        ask(client, "a1")
    assert all(each.is_healthy for each in client.replicas())


def test_when_all_are_gone_the_stream_is_lost(fleet, connect):
    client = connect()
    for each in fleet.values():
        each.kill()
    with pytest.raises(errors.StreamLost):
        ask(client, "a1")


def test_a_name_stands_for_its_replicas(fleet, connect, monkeypatch):
    replica = next(iter(fleet.values()))
    port = replica.address.rpartition(":")[2]
    second = FakeReplica(f"127.0.0.2:{port}")
    ips = ["127.0.0.1", "127.0.0.2"]
    monkeypatch.setattr(addresses, "lookup", lambda host, port: ips)
    client = connect(f"replicas.example:{port}")
    for name in NAMES:
        ask(client, name)
    assert {each.address for each in client.replicas()} == {f"{ip}:{port}" for ip in ips}
    keys = {name: rank([f"{ip}:{port}" for ip in ips], f"default/{name}")[0] for name in NAMES}
    assert Counter(keys.values())[f"127.0.0.2:{port}"] == len(second.keys)
    second.kill()


def test_a_name_of_one_replica_follows_it_before_the_former_one_ends(
    fleet, connect, monkeypatch, request
):
    """A channel that is open stays with its address until that fails."""
    api = grpc.aio if "async" in request.node.callspec.id else grpc
    former, later, _ = fleet
    stands_for = {"ip": "10.0.0.1", "address": former}
    monkeypatch.setattr(addresses, "RESOLVE_S", 0.0)
    monkeypatch.setattr(addresses, "lookup", lambda host, port: [stands_for["ip"]])

    def factory(address, credentials, options):
        assert address == "replica.example:7080"
        return api.insecure_channel(stands_for["address"], options=options)

    client = connect("replica.example:7080", channel_factory=factory)
    assert [ask(client) for _ in range(3)] == [former] * 3
    stands_for |= {"ip": "10.0.0.2", "address": later}
    end = time.monotonic() + TIMEOUT_S
    while ask(client) != later:
        assert time.monotonic() < end
    assert [ask(client) for _ in range(3)] == [later] * 3


def test_a_name_that_is_unknown_is_a_lost_stream(connect, monkeypatch):
    def fail(host, port):
        raise OSError("no such name")

    monkeypatch.setattr(addresses, "lookup", fail)
    client = connect("no-such-name.invalid:7080")
    with pytest.raises(errors.StreamLost):
        ask(client)


def test_one_address_is_asked_without_probes():
    replica = FakeReplica()
    asked = []
    replica.health.Check = lambda request, context: asked.append(request)
    with Client(replica.address, retry=RETRY) as client:
        assert client.complete("hi", adapter="a1").text == replica.address
        assert client.complete("hi").text == replica.address
        assert [(each.address, each.is_healthy) for each in client.replicas()] == [
            (replica.address, True)
        ]
    assert replica.keys == ["default/a1", None]
    assert asked == []
    replica.kill()


def test_a_refused_argument_is_named():
    with pytest.raises(errors.InvalidArgument, match="tenant"):
        Client("127.0.0.1:1", tenant="No Tenant")
    with pytest.raises(errors.InvalidArgument, match="inference"):
        Client(["127.0.0.1:1", ""])
    with pytest.raises(errors.InvalidArgument, match=r"the token would go to b\.example:1"):
        Client("127.0.0.1:1,b.example:1", token="secret")


def test_channels_come_from_the_factory(fleet, connect, request):
    api = grpc.aio if "async" in request.node.callspec.id else grpc
    opened = []

    def factory(address, credentials, options):
        opened.append((address, credentials))
        assert ("grpc.min_reconnect_backoff_ms", 2000) in options
        return api.insecure_channel(address, options=options)

    client = connect(channel_factory=factory)
    assert ask(client, "a1") == home(fleet, "a1")[0]
    assert set(opened) <= {(address, None) for address in fleet}
    assert len(opened) == len(set(opened)) > 0


def test_all_replicas_are_paused_also_those_that_came_since(fleet, connect, monkeypatch):
    first, second, _ = fleet
    for each in fleet.values():
        each.service.on("PauseGeneration", pb.PauseGenerationResponse(held_requests=1))
    stands_for = {"replicas": [Endpoint(first)]}
    monkeypatch.setattr(addresses, "resolve", lambda target: stands_for["replicas"])
    client = connect("replicas.example:7080")
    assert client.call("pause") == 1
    stands_for["replicas"] = [Endpoint(first), Endpoint(second)]
    monkeypatch.setattr(addresses, "RESOLVE_S", 0.0)
    assert client.call("pause") == 2


def test_a_replica_that_is_not_known_is_refused_and_those_that_are_are_named(fleet, connect):
    client = connect()
    with pytest.raises(errors.InvalidArgument, match=next(iter(fleet))) as caught:
        client.call("sleep", replica="127.0.0.1:1")
    assert caught.value.subject == "replica"
    assert len(client.client._channels.opened()) == len(fleet)


FILE = b"a file"
BOTH = {"data": FILE, "sha256": hashlib.sha256(FILE).digest()}


def asks(**image):
    return [{"role": "user", "content": "hi", "images": [image]}]


@pytest.mark.parametrize("adapter", ["a1", ""])
def test_the_replica_that_lacks_an_image_gets_it(fleet, connect, fail, adapter):
    lacks = fail(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND")
    keys = []
    for each in fleet.values():
        each.service.on("Generate", lacks, each.generate)

        def receive(request, context):
            keys.append(dict(context.invocation_metadata()).get(ADAPTER_HEADER))
            return pb.UploadImageResponse(sha256=BOTH["sha256"])

        each.service.on("UploadImage", receive)
    found = connect().call("complete", asks(**BOTH), adapter=adapter, cache_salt="s")
    assert not adapter or found.text == home(fleet, adapter)[0]
    service = fleet[found.text].service
    [(described, piece)] = service.requests["UploadImage"]
    assert (described.upload.size_bytes, described.upload.cache_salt) == (len(FILE), "s")
    assert piece.chunk == FILE
    sent = [each.chat.messages[0].images[0] for each in service.requests["Generate"]]
    assert [(each.sha256, each.data) for each in sent] == [(BOTH["sha256"], b"")] * 2
    assert keys == fleet[found.text].keys == ["default/a1" if adapter else None]
    others = [each for each in fleet.values() if each.address != found.text]
    assert not any(each.service.requests for each in others)


@pytest.mark.parametrize(("image", "num_uploads"), [(BOTH, 1), ({"sha256": b"x" * 32}, 0)])
def test_an_image_is_uploaded_once_if_the_caller_has_it(fleet, connect, fail, image, num_uploads):
    client, first = connect(), home(fleet, "a1")[0]
    service = fleet[first].service
    lacks = fail(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND")
    service.on("UploadImage", pb.UploadImageResponse(sha256=BOTH["sha256"]))
    for rpc, method in (("Generate", "complete"), ("Tokenize", "tokenize")):
        service.on(rpc, lacks)
        with pytest.raises(errors.NotFound):
            client.call(method, asks(**image), adapter="a1")
        assert len(service.requests[rpc]) == 1 + num_uploads
        assert len(service.requests.pop("UploadImage", [])) == num_uploads


def test_all_uploads_of_a_call_have_its_deadline(fleet, connect, fail):
    files = [b"one", b"two"]
    images = [{"data": each, "sha256": hashlib.sha256(each).digest()} for each in files]
    remaining_s = []

    def receive(request, context):
        remaining_s.append(context.time_remaining())
        if len(remaining_s) == 1:
            time.sleep(2.0)
        return pb.UploadImageResponse(sha256=b"x" * 32)

    service = fleet[home(fleet, "a1")[0]].service
    service.on("Generate", fail(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND"))
    service.on("UploadImage", receive)
    prompt = [{"role": "user", "content": "hi", "images": images}]
    with pytest.raises(errors.NotFound):
        connect().call("complete", prompt, adapter="a1", timeout_s=10.0)
    assert len(remaining_s) == 2
    assert remaining_s[1] < 9.0, "gRPC rounds up"


def test_an_image_can_be_uploaded_to_its_adapters_replica(fleet, connect):
    service = fleet[home(fleet, "a1")[0]].service
    service.on("UploadImage", pb.UploadImageResponse(sha256=BOTH["sha256"]))
    data = bytes(range(256)) * 5000
    assert connect().call("upload_image", data, adapter="a1") == BOTH["sha256"]
    [(described, *pieces)] = service.requests["UploadImage"]
    assert described.upload.size_bytes == len(data)
    assert len(pieces) == 3
    assert b"".join(each.chunk for each in pieces) == data
