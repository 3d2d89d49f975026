"""What callers that mean harm send over gRPC: messages, and calls that no library would make."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2
from tests.support.http2 import Connection, message

HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVICES = {
    "store": store_pb.DESCRIPTOR.services_by_name["AdapterStoreService"],
    "inference": inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
}


class HarmfulMessage(NamedTuple):
    """A message of a size that gRPC lets arrive, and whose token sends it to which method."""

    service: str
    token: str
    method: str
    make: Callable[[], bytes]


def paths_of(name: str) -> list[str]:
    """Returns the paths of every method that a service has, and of one that it has not."""
    found = SERVICES[name]
    own = [f"/{found.full_name}/{method.name}" for method in found.methods]
    return [*own, f"{HEALTH}/Check", f"{HEALTH}/Watch", REFLECTION, "/no.Such/Method"]


def stray_calls(address: str, path: str, dice: random.Random) -> Connection:
    """Makes up to a hundred calls of a method without a token within a second, and leaves them as
    they are."""
    end_s = time.monotonic() + 1
    connection = Connection(address)
    connection.receive(0.05)
    for _ in range(dice.choice((1, 4, 100))):
        size = dice.choice((0, 100, 60_000, 1 << 20, (8 << 20) - 100, 60 << 20))
        payload = dice.choice((b"\0", b"\x12\x7f" + b"x" * 127, b"\xf8\x07\x01")) * (1 << 14)
        payload = (payload * (size // len(payload) + 1))[:size]
        sent = dice.choice((len(payload), len(payload) - 1, len(payload) // 2))
        stream = connection.call(path, **dice.choice(({}, {"authorization": "Bearer guess"})))
        whole = message(payload, compressed=dice.random() < 0.1)[: sent + 5]
        connection.send(stream, whole, end=dice.random() < 0.5, wait_s=0.02)
        if not connection.is_open or time.monotonic() > end_s:
            break
    return connection


def delimited(field: int, body: bytes) -> bytes:
    size, length = len(body), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + body


def empty_targets(num_targets: int) -> bytes:
    return delimited(1, b"\x2a\x00" * num_targets)


def labels() -> bytes:
    return b"".join(b"\x3a\x0a\x0a\x05%05d\x12\x01x" % (n % 100_000) for n in range(690_000))


def long_filter() -> bytes:
    text = " ".join(f"label.a{number}=b" for number in range(28_000))
    return store_pb.ListAdaptersRequest(filter=text).SerializeToString()


def valid_layout() -> bytes:
    target: dict[str, Any] = {"kind": 1, "in_features": 64, "out_features": 64}
    targets = [
        store_pb.Target(name=f"model.layers.{layer}.a{number}", layer=layer, group="g", **target)
        for layer in range(50)
        for number in range(1000)
    ]
    layout = store_pb.ModelLayout(
        base_model="x",
        config_sha256="a" * 64,
        dtype="DATA_TYPE_FLOAT32",
        image_formats=[1],
        targets=targets,
    )
    return store_pb.RegisterLayoutRequest(layout=layout).SerializeToString()


UNKNOWN = b"\xf8\x07\x01"
MESSAGES = {
    "labels": HarmfulMessage("store", "attacker", "RegisterAdapter", labels),
    "tenants": HarmfulMessage("store", "attacker", "GetAdapter", lambda: b"\x12\x01a" * 2_700_000),
    "empty targets": HarmfulMessage(
        "store", "server", "RegisterLayout", lambda: empty_targets(1 << 17)
    ),
    "more empty targets": HarmfulMessage(
        "store", "server", "RegisterLayout", lambda: empty_targets(4_000_000)
    ),
    "targets": HarmfulMessage("store", "server", "RegisterLayout", valid_layout),
    "unknown fields": HarmfulMessage(
        "store", "attacker", "WatchAdapters", lambda: UNKNOWN * 2_700_000
    ),
    "unknown fields of a chunk": HarmfulMessage(
        "store", "attacker", "UploadAdapter", lambda: delimited(2, UNKNOWN * 1_390_000)
    ),
    "filter": HarmfulMessage("store", "attacker", "ListAdapters", long_filter),
    "ids that are not packed": HarmfulMessage(
        "inference", "attacker", "Generate", lambda: delimited(5, b"\x08\x01" * 2_000_000)
    ),
    "empty messages of a chat": HarmfulMessage(
        "inference", "attacker", "Generate", lambda: delimited(6, b"\x0a\x00" * 16_384)
    ),
    "a long text": HarmfulMessage(
        "inference", "attacker", "Generate", lambda: delimited(4, b"x " * 2_090_000)
    ),
}
