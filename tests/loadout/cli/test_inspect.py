"""`loadout inspect` against scripted services."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as pb
from tests.loadout.fakes import FakeReplica

A, B = store_pb.SEGMENT_KIND_A, store_pb.SEGMENT_KIND_B


def answer(
    *, num_layers: int = 3, num_extents: int = 1, **fields: Any
) -> pb.InspectAdapterResponse:
    """q_proj of every layer, at another rank in the last one, and the embedding."""
    adapter = {"tier": pb.ADAPTER_TIER_DEVICE, "bytes": 40_000, "rank": 8, **fields}
    response = pb.InspectAdapterResponse(
        adapter=pb.ResidentAdapter(names=["default/a@1"], digest="sha256:a", **adapter),
        slot=3,
        extents=[pb.ResidentExtent(offset=n << 16, bytes=256) for n in range(num_extents)],
        kernels="triton, captured",
    )
    embedding = response.targets.add(name="model.embed_tokens", rank=4)
    embedding.kind = store_pb.TARGET_KIND_EMBEDDING
    embedding.segments.add(kind=A, bytes=100, offset=0)
    response.groups.add(name="embed", targets=[0], launches=1)
    for layer in range(num_layers):
        is_last = layer == num_layers - 1
        target = response.targets.add(
            name=f"model.layers.{layer}.self_attn.q_proj",
            layer=layer,
            kind=store_pb.TARGET_KIND_LINEAR,
            rank=8 if is_last else 4,
        )
        target.segments.add(kind=A, bytes=1000, offset=1000 + 4000 * layer)
        target.segments.add(kind=B, bytes=2000, offset=2000 + 4000 * layer)
        response.groups.add(name=f"layers.{layer}.qkv", targets=[layer + 1], launches=2)
        response.groups.add(name=f"layers.{layer}.o", launches=2)
    response.launches = sum(group.launches for group in response.groups)
    return response


def test_layers_with_the_same_parts_are_a_row(run, fake_inference):
    fake_inference.on("InspectAdapter", answer(pinned=True))
    code, out, err = run("inspect", "a")
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == [
        "default/a@1: rank 8, 40.0 kB, sha256:a",
        "on the device, slot 3, pinned, 1 extent: bytes 0-255",
        "",
        "layers  module              kind       rank  holds       size  from byte",
        "        model.embed_tokens  embedding     4  a      100 bytes          0",
        "0-1     self_attn.q_proj    linear        4  a, b      6.0 kB       1000",
        "2       self_attn.q_proj    linear        8  a, b      3.0 kB       9000",
        "",
        "layers  group  its modules   launches",
        "        embed  embed_tokens         1",
        "0-2     qkv    q_proj               6",
        "0-2     o      none                 6",
        "",
        "7 groups, 13 launches per decode step of its requests alone (triton, captured)",
        "3 of these groups, 6 launches, change nothing: they run because a step serves any mix of "
        "adapters",
    ]
    assert [each.ref for each in fake_inference.requests["InspectAdapter"]] == ["a"]


def test_json_has_every_part(run, fake_inference):
    fake_inference.on("InspectAdapter", answer())
    [row] = json.loads(run("inspect", "a", "--json")[1])
    assert row["replica"].startswith("127.0.0.1:")
    assert (row["slot"], row["launches"], len(row["targets"]), len(row["groups"])) == (3, 13, 4, 7)
    assert row["targets"][3] == {
        "name": "model.layers.2.self_attn.q_proj",
        "layer": 2,
        "kind": "linear",
        "rank": 8,
        "segments": [
            {"kind": "a", "num_bytes": 1000, "offset": 9000},
            {"kind": "b", "num_bytes": 2000, "offset": 10000},
        ],
    }
    assert row["extents"] == [{"offset": 0, "num_bytes": 256}]


def test_host_tier_and_many_extents(run, fake_inference):
    fake_inference.on("InspectAdapter", answer(num_extents=6, tier=pb.ADAPTER_TIER_HOST))
    _, place, *_, operations, _ = run("inspect", "a")[1].splitlines()
    assert place == (
        "in host memory, slot 3, 6 extents: "
        "bytes 0-255, 65536-65791, 131072-131327, 196608-196863 and 2 more"
    )
    assert operations.endswith(" (triton, captured), once it is on the device")


def test_an_adapter_that_changes_nothing(run, fake_inference):
    empty = pb.InspectAdapterResponse(
        adapter=pb.ResidentAdapter(digest="sha256:a", tier=pb.ADAPTER_TIER_DEVICE), kernels="torch"
    )
    fake_inference.on("InspectAdapter", empty)
    assert run("inspect", "a") == (
        0,
        "sha256:a: rank 0, 0 bytes\non the device, slot 0\n\n"
        "0 groups, 0 operations per decode step of its requests alone (torch)\n",
        "",
    )


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_failure_is_one_line(run, fake_inference, fail, flags):
    missing = fail(grpc.StatusCode.NOT_FOUND, "NOT_RESIDENT", message="a is not resident")
    fake_inference.on("InspectAdapter", missing)
    assert run("inspect", "a", *flags) == (1, "", "loadout: a is not resident (NOT_RESIDENT)\n")


def test_every_replica(run, fail):
    replicas = [FakeReplica(), FakeReplica(), FakeReplica()]
    broken, *whole = replicas
    broken.service.on(
        "InspectAdapter", fail(grpc.StatusCode.NOT_FOUND, "NOT_RESIDENT", message="not there")
    )
    for each in whole:
        each.service.on("InspectAdapter", answer())
    addresses = ",".join(each.address for each in replicas)
    code, out, err = run("inspect", "a", "--every-replica", "--inference", addresses)
    assert (code, err) == (1, f"loadout: {broken.address}: not there (NOT_RESIDENT)\n")
    for each in whole:
        assert f"{each.address}: default/a@1: rank 8" in out
    code, out, err = run("inspect", "a", "--every-replica", "--json", "--inference", addresses)
    assert code == 1
    assert {row["replica"] for row in json.loads(out)} == {each.address for each in whole}
    for each in replicas:
        each.kill()
