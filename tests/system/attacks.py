"""What callers that mean harm send over gRPC: messages, and calls that no library would make."""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2
from tests.support.servers.http2 import Connection, message

HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STRANGER = "127.0.0.2"
"""Where they come from: not from the address of others, whom the service does not let wait."""
NUM_STRANGERS = 60
"""Addresses from there on."""
NUM_METADATA, NUM_RESETTING, NUM_HALF = 64, 8, 1900
METADATA_BYTES, NUM_RESETS = 15_000, 500
CONNECT_S = 1.0
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
    they are. Raises OSError if the server lets it wait for a connection."""
    end_s = time.monotonic() + 1
    connection = Connection(address, source=f"127.0.0.{dice.randrange(2, 2 + NUM_STRANGERS)}")
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


def metadata_storm(address: str, path: str, end_s: float) -> None:
    """Calls with large metadata on many connections; what is closed is opened again."""
    text = "x" * METADATA_BYTES

    def call(connection: Connection) -> None:
        for _ in range(10):
            connection.call(path, x_large=text)

    _storm(address, NUM_METADATA, call, end_s)


def reset_storm(address: str, path: str, end_s: float) -> None:
    """Begins calls and resets each at once; what is closed is opened again."""
    _storm(address, NUM_RESETTING, lambda connection: connection.storm(NUM_RESETS, path), end_s)


def _storm(
    address: str, num_connections: int, act: Callable[[Connection], None], end_s: float
) -> None:
    """Acts on so many connections in turn until `end_s` of the monotonic clock."""
    held: list[Connection] = []
    while time.monotonic() < end_s:
        while len(held) < num_connections and (left_s := end_s - time.monotonic()) > 0:
            try:
                held.append(Connection(address, source=STRANGER, connect_s=left_s))
            except OSError:
                break
            held[-1].receive(0.02)
        for connection in held:
            if time.monotonic() > end_s:
                break
            act(connection)
            connection.receive()
        for connection in [each for each in held if not each.is_open]:
            connection.__exit__()
            held.remove(connection)
    for connection in held:
        connection.__exit__()


def half_handshakes(address: str, rounds: int) -> int:
    """Opens many connections at once and sends half of a hello of TLS on each, again and again.
    Returns how many were opened."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    host, _, port = address.rpartition(":")
    num_opened = 0
    for _ in range(rounds):
        with ExitStack() as stack, suppress(OSError):
            for _ in range(NUM_HALF):
                held = socket.create_connection(
                    (host, int(port)), timeout=CONNECT_S, source_address=(STRANGER, 0)
                )
                stack.enter_context(held)
                held.sendall(hello[: len(hello) // 2])
                num_opened += 1
    return num_opened


def delimited(field: int, body: bytes) -> bytes:
    size, length = len(body), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + body


def empty_targets(num_targets: int) -> bytes:
    return delimited(1, b"\x2a\x00" * num_targets)


def labels() -> bytes:
    different = b"".join(b"\x3a\x0a\x0a\x05%05d\x12\x01x" % n for n in range(100_000))
    return (different * 7)[: len(different) * 69 // 10]


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
