"""`load`, `unload`, `pin`, `unpin` and `residents` against scripted services."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as pb
from tests.loadout.fakes import FakeReplica

DEVICE, HOST = pb.ADAPTER_TIER_DEVICE, pb.ADAPTER_TIER_HOST


def resident(name: str, **fields: Any) -> pb.ResidentAdapter:
    fields = {"tier": DEVICE, "bytes": 2000, "rank": 8, "load_seconds": 0.25, **fields}
    return pb.ResidentAdapter(names=[f"default/{name}@1"], digest=f"sha256:{name}", **fields)


@pytest.fixture
def listing(fake_inference):
    """Three residents, of which one is pinned; those that are unloaded free 2000 bytes."""
    adapters = [resident("a"), resident("b", pinned=True), resident("c", tier=HOST)]
    listed = pb.ListResidentAdaptersResponse(adapters=adapters)
    fake_inference.on("ListResidentAdapters", listed)
    fake_inference.on("UnloadAdapter", pb.UnloadAdapterResponse(freed_bytes=2000))
    return fake_inference


def test_load(run, fake_inference):
    loaded = pb.LoadAdapterResponse(adapter=resident("a", pinned=True))
    fake_inference.on("LoadAdapter", loaded)
    code, out, err = run("load", "a", "b@2", "--pin")
    assert (code, err) == (0, "")
    header, *rows = (line.split() for line in out.splitlines())
    assert header[:2] == ["adapter", "tier"]
    assert rows[0] == [
        "default/a@1",
        "device",
        "8",
        "2.0",
        "kB",
        "0",
        "0",
        "s",
        "250",
        "ms",
        "pinned",
    ]
    requests = fake_inference.requests["LoadAdapter"]
    assert [(each.ref, each.pin) for each in requests] == [("a", True), ("b@2", True)]
    [row] = json.loads(run("load", "a", "--json")[1])
    assert row["load_seconds"] == 0.25
    assert row["replica"]


def test_residents(run, listing):
    code, out, err = run("residents", "--limit", "7")
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["device", "device", "host"]
    assert listing.requests["ListResidentAdapters"][0].limit == 7
    assert [row["pinned"] for row in json.loads(run("residents", "--json")[1])] == [
        False,
        True,
        False,
    ]


def test_superseded_residents(run, fake_inference):
    listed = pb.ListResidentAdaptersResponse(adapters=[resident("a", superseded=True)])
    fake_inference.on("ListResidentAdapters", listed)
    assert run("residents")[1].splitlines()[1].startswith("default/a@1 (old)  device")
    assert json.loads(run("residents", "--json")[1])[0]["superseded"]


def test_no_residents(run, fake_inference):
    fake_inference.on("ListResidentAdapters", pb.ListResidentAdaptersResponse())
    assert run("residents") == (0, "no adapter is resident\n", "")


def test_unload(run, listing):
    assert run("unload", "a") == (0, "a unloaded, 2.0 kB freed\n", "")
    assert [each.ref for each in listing.requests["UnloadAdapter"]] == ["a"]


def test_unload_all_keeps_what_is_pinned_or_loading(run, listing, fail):
    loading = fail(grpc.StatusCode.FAILED_PRECONDITION, "LOADING", message="is loading")
    listing.on("UnloadAdapter", pb.UnloadAdapterResponse(freed_bytes=2000), loading)
    code, out, err = run("unload", "--all")
    assert (code, out) == (0, "default/a@1 unloaded, 2.0 kB freed\n")
    assert err == "default/c@1: is loading (LOADING)\n"
    refs = [each.ref for each in listing.requests["UnloadAdapter"]]
    assert refs == ["sha256:a", "sha256:c"]


@pytest.mark.parametrize("arguments", [[], ["a", "--all"]], ids=["neither", "both"])
def test_unload_needs_adapters_or_all(run, arguments):
    code, out, err = run("unload", *arguments)
    assert (code, out) == (2, "")
    assert "either adapters or --all" in err


def test_pin_and_unpin(run, fake_inference, fake_store):
    pinned = resident("a", pinned=True)
    fake_inference.on("PinAdapter", pb.PinAdapterResponse(adapter=pinned))
    fake_inference.on("UnpinAdapter", pb.UnpinAdapterResponse(adapter=resident("a")))
    adapter = store_pb.Adapter(name="default/a", version=1, pinned=True)
    fake_store.on("PinAdapter", store_pb.PinAdapterResponse(adapter=adapter))
    fake_store.on("UnpinAdapter", store_pb.UnpinAdapterResponse(adapter=adapter))
    code, out, err = run("pin", "a")
    assert (code, err) == (0, "")
    assert out.startswith("default/a@1 pinned on the device of 127.0.0.1:")
    assert "PinAdapter" not in fake_store.requests
    both = "default/a@1 pinned in the memory of the store\n"
    assert run("pin", "a", "--in", "store")[1] == both
    found = json.loads(run("pin", "a", "--in", "both", "--json")[1])
    assert found["inference"][0]["pinned"]
    assert found["store"][0]["ref"] == "default/a@1"
    code, out, err = run("unpin", "a", "--in", "both")
    assert [line.split()[1] for line in out.splitlines()] == ["unpinned", "unpinned"]


def test_a_failure_is_one_line(run, fake_inference, fail):
    missing = fail(grpc.StatusCode.NOT_FOUND, "NOT_RESIDENT", message="a is not resident")
    fake_inference.on("PinAdapter", missing)
    assert run("pin", "a") == (1, "", "loadout: a is not resident (NOT_RESIDENT)\n")


def test_every_replica(run):
    replicas = [FakeReplica(), FakeReplica()]
    addresses = ",".join(each.address for each in replicas)
    for each in replicas:
        each.service.on(
            "ListResidentAdapters", pb.ListResidentAdaptersResponse(adapters=[resident("a")])
        )
    code, out, err = run("load", "a", "--every-replica", "--json", "--inference", addresses)
    assert (code, err) == (0, "")
    assert {row["replica"] for row in json.loads(out)} == {each.address for each in replicas}
    code, out, err = run("unload", "--all", "--inference", addresses)
    assert (code, err) == (1, "loadout: --all with several replicas needs --every-replica\n")
    code, out, err = run("unload", "--all", "--every-replica", "--inference", addresses)
    assert (code, err, len(out.splitlines())) == (0, "", 2)
    for each in replicas:
        assert len(each.service.requests["UnloadAdapter"]) == 1
        each.kill()


@pytest.mark.parametrize("command", ["load", "pin", "residents", "unload"])
def test_a_replica_that_fails_stops_no_other(run, fail, command):
    replicas = [FakeReplica(), FakeReplica()]
    broken, whole = replicas
    methods = ["LoadAdapter", "PinAdapter", "ListResidentAdapters", "UnloadAdapter"]
    for method in methods:
        broken.service.on(
            method, fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM", message="full")
        )
    whole.service.on("PinAdapter", pb.PinAdapterResponse(adapter=resident("a", pinned=True)))
    whole.service.on(
        "ListResidentAdapters", pb.ListResidentAdaptersResponse(adapters=[resident("a")])
    )
    addresses = ",".join(each.address for each in replicas)
    ref = [] if command == "residents" else ["a"]
    code, out, err = run(command, *ref, "--every-replica", "--inference", addresses)
    assert code == 1
    assert err == f"loadout: {broken.address}: full (NO_ROOM)\n"
    assert "a" in out
    for each in replicas:
        each.kill()


def test_what_succeeded_before_a_failure_is_shown(run, fake_inference, fail):
    missing = fail(grpc.StatusCode.NOT_FOUND, "NOT_RESIDENT", message="b is not resident")
    pinned = pb.PinAdapterResponse(adapter=resident("a", pinned=True))
    fake_inference.on("PinAdapter", pinned, missing)
    code, out, err = run("pin", "a", "b")
    assert (code, err) == (1, "loadout: b is not resident (NOT_RESIDENT)\n")
    assert out.startswith("default/a@1 pinned on the device of ")


def test_the_store_alone_needs_no_replica(run, fake_store, monkeypatch):
    """No name of the inference service is resolved, which may take seconds."""
    monkeypatch.setattr("loadout.cli.adapters.residents.replicas_of", None)
    adapter = store_pb.Adapter(name="default/a", version=1, pinned=True)
    fake_store.on("PinAdapter", store_pb.PinAdapterResponse(adapter=adapter))
    assert run("pin", "a", "--in", "store")[0] == 0
