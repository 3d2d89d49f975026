"""Channels to the store's replicas: made when first needed, closed when their replica is gone."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from inference_svc.store.convert import OUT_OF_ORDER
from inference_svc.store.credentials import StoreAccess
from inference_svc.store.replicas import Endpoint, Replicas
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

CONNECT_SECONDS = 2.0
"""What a machine that is not there costs the first pull that it is asked for."""

PULL_METHOD = f"/{pb.DESCRIPTOR.services_by_name['AdapterStoreService'].full_name}/PullAdapter"

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", -1),
    # In frames of 16 KiB, as is usual, a pull takes a tenth longer.
    ("grpc.http2.max_frame_size", 1 << 20),
    # A store that comes back is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # In spite of its name, this bounds how long an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_SECONDS * 1000)),
    # A machine that vanished without closing its connections is noticed while a pull waits, early
    # enough to pull from another.
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # While a ping that measures the connection is under way, no other is sent.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # Bulk bytes and questions do not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(kind: Any, endpoint: Endpoint, access: StoreAccess) -> Any:
    """`kind` is grpc or grpc.aio."""
    trusted = access.certificates
    if trusted is None:
        return kind.insecure_channel(endpoint.address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(trusted.ca, trusted.key, trusted.chain)
    options = CHANNEL_OPTIONS
    if endpoint.server_name:
        # The certificate is for the name that we were given, not for what it resolves to.
        options += (("grpc.ssl_target_name_override", endpoint.server_name),)
    return kind.secure_channel(endpoint.address, credentials, options=options)


class Line:
    """A channel to one replica; `num_calls` are those in progress."""

    def __init__(self, endpoint: Endpoint, channel: Any) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.stub = pb_grpc.AdapterStoreServiceStub(channel)
        # Its responses are not parsed here: see `store_convert.to_pull_message`.
        self.pull = channel.unary_stream(
            PULL_METHOD, request_serializer=pb.PullAdapterRequest.SerializeToString
        )
        self.num_calls = 0


class Lines:
    """The channels of one client, whose fate the policy of `replicas` hears of.

    From any thread, but for aio's of course. Every `begin` has its `end`.
    """

    def __init__(self, kind: Any, replicas: Replicas, access: StoreAccess) -> None:
        self._kind = kind
        self._replicas = replicas
        self._access = access
        self._lock = threading.Lock()
        self._lines: dict[Endpoint, Line] = {}
        self._retired: list[Line] = []

    def begin(self, endpoint: Endpoint) -> Line:
        """For a call: the channel stays open until `end`, whatever becomes of the replica."""
        with self._lock:
            line = self._lines.get(endpoint)
            if line is None:
                line = Line(endpoint, open_channel(self._kind, endpoint, self._access))
                self._lines[endpoint] = line
            line.num_calls += 1
            return line

    def end(self, line: Line) -> None:
        with self._lock:
            line.num_calls -= 1

    def answered(self, line: Line) -> None:
        self._replicas.answered(line.endpoint.address)

    def failed(self, line: Line, code: grpc.StatusCode) -> None:
        if code in OUT_OF_ORDER:
            self._replicas.failed(line.endpoint.address)
            self.retire(line)

    def retire(self, line: Line) -> None:
        """A channel that has failed waits before it connects again. Whoever comes when the replica
        is back shall not wait with it, and gets another."""
        with self._lock:
            if self._lines.get(line.endpoint) is line:
                self._retired.append(self._lines.pop(line.endpoint))

    def take_unused(self) -> list[Any]:
        """Channels that the caller is to close: retired ones, and those to replicas of the past."""
        wanted = set(self._replicas.endpoints)
        with self._lock:
            for endpoint in [endpoint for endpoint in self._lines if endpoint not in wanted]:
                self._retired.append(self._lines.pop(endpoint))
            unused = [line.channel for line in self._retired if not line.num_calls]
            self._retired = [line for line in self._retired if line.num_calls]
        return unused

    def take_all(self) -> list[Any]:
        with self._lock:
            channels = [line.channel for line in (*self._lines.values(), *self._retired)]
            self._lines.clear()
            self._retired.clear()
        return channels
