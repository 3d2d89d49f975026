"""Channels to the store's replicas: opened when first needed, closed when their replica is gone."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from inference_svc.store.convert import REPLICA_FAILURES
from inference_svc.store.credentials import StoreAccess
from inference_svc.store.replicas import Endpoint, Replicas
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

CONNECT_SECONDS = 2.0
"""How long the first pull from an unreachable machine is delayed."""

PULL_METHOD = f"/{pb.DESCRIPTOR.services_by_name['AdapterStoreService'].full_name}/PullAdapter"

MAX_MESSAGE_BYTES = 64 << 20
"""The memory that a broken store may make this service hold: chunks of images have half a MiB, the
header of the largest model that we know of 6 MB."""

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # With the default frames of 16 KiB a pull takes a tenth longer.
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
    # Bulk data and catalog calls do not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    # With gRPC's own retries, which are under ours, a pull that is opened while its connection ends
    # may never end, with any deadline (grpcio 1.80 to 1.85, blocking streams).
    ("grpc.enable_retries", 0),
)


def open_channel(api: Any, endpoint: Endpoint, access: StoreAccess) -> Any:
    """`api` is grpc or grpc.aio."""
    trusted = access.certificates
    if trusted is None:
        return api.insecure_channel(endpoint.address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(trusted.ca, trusted.key, trusted.chain)
    options = CHANNEL_OPTIONS
    if endpoint.server_name:
        # The certificate is for the configured name, not for the address it resolves to.
        options += (("grpc.ssl_target_name_override", endpoint.server_name),)
    return api.secure_channel(endpoint.address, credentials, options=options)


class PooledChannel:
    """A channel to one replica, with `num_calls` in progress."""

    def __init__(self, endpoint: Endpoint, channel: Any) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.stub = pb_grpc.AdapterStoreServiceStub(channel)
        # Responses stay serialized here: see `convert.to_pull_message`.
        self.pull = channel.unary_stream(
            PULL_METHOD, request_serializer=pb.PullAdapterRequest.SerializeToString
        )
        self.num_calls = 0


class ChannelPool:
    """The channels of one client; reports the outcome of its calls to `replicas`.

    Thread-safe, except that aio's channels belong to their event loop. Every `acquire` is paired
    with a `release`.
    """

    def __init__(self, api: Any, replicas: Replicas, access: StoreAccess) -> None:
        self._api = api
        self._replicas = replicas
        self._access = access
        self._lock = threading.Lock()
        self._channels: dict[Endpoint, PooledChannel] = {}
        self._retired: list[PooledChannel] = []

    def acquire(self, endpoint: Endpoint) -> PooledChannel:
        """Returns a channel for one call; it stays open until `release`, even when the replica is
        removed."""
        with self._lock:
            pooled = self._channels.get(endpoint)
            if pooled is None:
                pooled = PooledChannel(endpoint, open_channel(self._api, endpoint, self._access))
                self._channels[endpoint] = pooled
            pooled.num_calls += 1
            return pooled

    def hold(self, pooled: PooledChannel) -> None:
        """Counts one more call on a channel that has one."""
        with self._lock:
            pooled.num_calls += 1

    def release(self, pooled: PooledChannel) -> None:
        with self._lock:
            pooled.num_calls -= 1

    def report_success(self, pooled: PooledChannel) -> None:
        self._replicas.report_success(pooled.endpoint.address)

    def report_failure(self, pooled: PooledChannel, code: grpc.StatusCode) -> None:
        if code in REPLICA_FAILURES:
            self._replicas.report_failure(pooled.endpoint.address)
            self.retire(pooled)

    def retire(self, pooled: PooledChannel) -> None:
        """Replaces the channel for later calls: a failed one waits before it reconnects, and calls
        made once the replica is back must not wait with it."""
        with self._lock:
            if self._channels.get(pooled.endpoint) is pooled:
                self._retired.append(self._channels.pop(pooled.endpoint))

    def pop_unused(self) -> list[Any]:
        """Removes and returns idle channels that are retired or belong to removed replicas; the
        caller closes them."""
        current = set(self._replicas.endpoints)
        with self._lock:
            for endpoint in [endpoint for endpoint in self._channels if endpoint not in current]:
                self._retired.append(self._channels.pop(endpoint))
            unused = [pooled.channel for pooled in self._retired if not pooled.num_calls]
            self._retired = [pooled for pooled in self._retired if pooled.num_calls]
        return unused

    def pop_all(self) -> list[Any]:
        with self._lock:
            channels = [each.channel for each in (*self._channels.values(), *self._retired)]
            self._channels.clear()
            self._retired.clear()
        return channels
