"""Channels to the store's replicas: made when first needed, closed when their replica is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import grpc

from inference_svc.replicas import Endpoint
from inference_svc.store_access import StoreAccess
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

CONNECT_SECONDS = 2.0
"""What a machine that is not there costs the first pull that it is asked for."""

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", -1),
    # A store that comes back is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # In spite of its name, this bounds how long an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_SECONDS * 1000)),
    # A machine that vanished without closing its connections is noticed while a pull waits, early
    # enough to pull from another.
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 3_000),
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
    """A channel to one replica; `num_streams` are those in progress."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.stub = pb_grpc.AdapterStoreServiceStub(channel)
        self.num_streams = 0


class Lines:
    """The channels of one client. From any thread, but for aio's of course."""

    def __init__(self, kind: Any, access: StoreAccess) -> None:
        self._kind = kind
        self._access = access
        self._lock = threading.Lock()
        self._lines: dict[Endpoint, Line] = {}

    def line(self, endpoint: Endpoint) -> Line:
        with self._lock:
            line = self._lines.get(endpoint)
            if line is None:
                line = Line(open_channel(self._kind, endpoint, self._access))
                self._lines[endpoint] = line
            return line

    def begin(self, endpoint: Endpoint) -> Line:
        """For a stream, until `end`: the channel stays open even if the replica is gone."""
        line = self.line(endpoint)
        with self._lock:
            line.num_streams += 1
        return line

    def end(self, line: Line) -> None:
        with self._lock:
            line.num_streams -= 1

    def take_unused(self, wanted: Iterable[Endpoint] = ()) -> list[Any]:
        """Channels that the caller is to close: to replicas that are not `wanted` any more."""
        keep = set(wanted)
        with self._lock:
            gone = [
                endpoint
                for endpoint, line in self._lines.items()
                if endpoint not in keep and not line.num_streams
            ]
            return [self._lines.pop(endpoint).channel for endpoint in gone]

    def take_all(self) -> list[Any]:
        with self._lock:
            channels = [line.channel for line in self._lines.values()]
            self._lines.clear()
        return channels
