"""The channels to the replicas of a service, and the health of each.

Replicas are probed while calls are made, and only where there is a choice: an idle client sends
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadout._routing.addresses import Resolver, is_name
from loadout._routing.metadata import read_load
from loadout._routing.replicas import Endpoint, Replicas
from loadout.security import ChannelFactory, ChannelOptions, Security

PROBE_TIMEOUT_S = 3.0
RESOLVE_TIMEOUT_S = 5.0
"""How long the first call waits until a name is resolved; then gRPC resolves it."""

FLEET_OPTIONS: ChannelOptions = (
    # In spite of its name, this bounds how long an attempt to connect may take, and so the delay
    # of the first call to a machine that is gone.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Streams of a machine that vanished without closing its connections end.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options of every channel if there are several replicas."""


class Transport(Protocol):
    """gRPC with threads or with tasks: see `loadout._rpc.threads`."""

    open_channel: ChannelFactory

    def call(
        self, method: Any, request: Any, timeout_s: float, done: Callable[[Any, Any, Any], None]
    ) -> None: ...
    def close_channel(self, channel: Any) -> None: ...


class ReplicaChannel:
    """The channel to one replica, and the `stub` of its service; `num_calls` are in progress on
    it."""

    def __init__(self, endpoint: Endpoint, channel: Any, stub: Callable[[Any], Any]) -> None:
        self.address = endpoint.address
        self.channel = channel
        self.stub = stub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.num_calls = 0


class Fleet:
    """The replicas of the service that `stub` calls. Every `acquire` has its `release`. `targets`
    are gRPC targets; a name among them may resolve to several replicas."""

    def __init__(
        self,
        transport: Transport,
        targets: list[str],
        security: Security,
        options: ChannelOptions,
        stub: Callable[[Any], Any],
    ) -> None:
        self._transport = transport
        self._stub = stub
        self._security = security
        self._options = options
        self._channels: dict[Endpoint, ReplicaChannel] = {}
        self.replicas = Replicas(map(Endpoint, targets))
        self._lock = self.replicas.lock
        self._resolver: Resolver | None = None
        if len(targets) == 1 and is_name(targets[0]):
            self._resolver = Resolver(targets[0], self.replicas.replace)

    @property
    def resolving(self) -> Future[None] | None:
        """Done once it is known, as far as it can be, how many replicas there are."""
        return None if self._resolver is None else self._resolver.first

    def acquire(self, key: str, avoid: Collection[str], *, may_spill: bool) -> ReplicaChannel:
        """Returns the channel for a call: see Replicas.acquire."""
        self.refresh()
        with self._lock:
            channel = self._channel(self.replicas.acquire(key, avoid, may_spill=may_spill))
            channel.num_calls += 1
            return channel

    def acquire_at(self, address: str) -> ReplicaChannel:
        """Returns the channel for a call to this replica: see Replicas.acquire_at."""
        with self._lock:
            channel = self._channel(self.replicas.acquire_at(address))
            channel.num_calls += 1
            return channel

    def release(
        self, channel: ReplicaChannel, trailers: Iterable[tuple[str, str | bytes]] | None = None
    ) -> None:
        """`trailers` are the response's, if there was one."""
        with self._lock:
            channel.num_calls -= 1
        self.replicas.release(channel.address)
        self.replicas.update_load(channel.address, read_load(trailers))

    def refresh(self) -> Future[None] | None:
        """Starts new probes and a new resolution of addresses if the last ones are old, without
        waiting. Returns the resolution of addresses; None if they cannot change."""
        resolution = None if self._resolver is None else self._resolver.refresh()
        for unused in self._pop_unused():
            self._transport.close_channel(unused)
        for endpoint in self.replicas.pop_due():
            with self._lock:
                channel = self._channel(endpoint)
            self._probe(channel)
        return resolution

    def channels(self) -> list[Any]:
        """Returns the open channels, for the caller to close."""
        with self._lock:
            return [each.channel for each in self._channels.values()]

    def _probe(self, channel: ReplicaChannel) -> None:
        def record(code: Any, response: Any, trailers: Any) -> None:
            is_serving = (
                response is not None and response.status == health_pb2.HealthCheckResponse.SERVING
            )
            # A server without the health service has at least answered.
            is_healthy: bool | None = is_serving or code is grpc.StatusCode.UNIMPLEMENTED
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                is_healthy = None
            self.replicas.record_probe(channel.address, is_healthy, read_load(trailers))

        request = health_pb2.HealthCheckRequest()
        self._transport.call(channel.health.Check, request, PROBE_TIMEOUT_S, record)

    def _channel(self, endpoint: Endpoint) -> ReplicaChannel:
        found = self._channels.get(endpoint)
        if found is None:
            is_alone = len(self.replicas.endpoints) == 1
            options = self._options if is_alone else (*self._options, *FLEET_OPTIONS)
            channel = self._security.open_channel(
                self._transport.open_channel, endpoint.address, options, endpoint.server_name
            )
            found = self._channels[endpoint] = ReplicaChannel(endpoint, channel, self._stub)
        return found

    def _pop_unused(self) -> list[Any]:
        """Returns the channels to former replicas whose calls have ended."""
        if self._resolver is None:
            return []
        current = set(self.replicas.endpoints)
        with self._lock:
            unused = [
                endpoint
                for endpoint, channel in self._channels.items()
                if endpoint not in current and not channel.num_calls
            ]
            return [self._channels.pop(endpoint).channel for endpoint in unused]
