"""The channels to both services, and the route of each call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from loadout._routing.addresses import split
from loadout._routing.fleet import Fleet, Transport
from loadout._routing.metadata import adapter_key, check_tenant
from loadout._rpc.calls import Call, Service, StreamCall
from loadout._rpc.route import Direct, Route, Routed, ToReplica
from loadout._rpc.tracing import Tracing
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.errors import InvalidArgument
from loadout.inference.v1 import inference_pb2_grpc as inference_grpc
from loadout.security import ChannelOptions, Security

Address = str | Sequence[str]
"""One gRPC target, several with commas between them, or a sequence of them."""

DEFAULT_TIMEOUT_S = 300.0

STORE, INFERENCE = "the adapter store", "the inference service"
"""How messages name the services."""

UPLOAD_RPC = "UploadAdapter"

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A page of 1000 adapters with long labels exceeds gRPC's default of 4 MiB."""

OPTIONS: ChannelOptions = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted service is found again within the retries of one call.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A new client does not inherit the backoff of another's failed attempts.
    ("grpc.use_local_subchannel_pool", 1),
    # With gRPC's own retries, which are under ours, a stream that is opened while its connection
    # ends may never end, with any deadline (grpcio 1.80 to 1.85, blocking streams).
    ("grpc.enable_retries", 0),
)


class Channels:
    """The channels to the services that a client has an address for; each is opened on first use.

    `tenant` is whose an adapter's name without one is. Raises as Security.check, addresses.split
    and metadata.check_tenant.
    """

    def __init__(
        self,
        transport: Transport,
        inference: Address | None,
        store: Address | None,
        security: Security,
        tenant: str,
        tracing: Tracing | None = None,
    ) -> None:
        check_tenant(tenant)
        self._transport = transport
        self._security = security
        self._tenant = tenant
        self._tracing = tracing
        self._opening = threading.Lock()  # a client may be shared between threads
        self._store: Any = None
        self._store_channel: Any = None
        self._store_targets = self._checked("store", store)
        self._store_fleet: Fleet | None = None
        if len(self._store_targets) > 1:
            self._store_fleet = Fleet(
                transport,
                self._store_targets,
                security,
                OPTIONS,
                store_grpc.AdapterStoreServiceStub,
            )
        self._fleet: Fleet | None = None
        if targets := self._checked("inference", inference):
            stub = inference_grpc.InferenceServiceStub
            self._fleet = Fleet(transport, targets, security, OPTIONS, stub)

    def _checked(self, argument: str, address: Address | None) -> list[str]:
        targets = split(argument, address) if address else []
        for target in targets:
            self._security.check(argument, target)
        return targets

    @property
    def fleet(self) -> Fleet:
        """Raises InvalidArgument if the client was made without this service's address."""
        if self._fleet is None:
            raise _no_address(Service.INFERENCE)
        return self._fleet

    def route(self, call: Call[Any] | StreamCall[Any]) -> Route:
        """Raises InvalidArgument if the client was made without this service's address."""
        route: Route
        if call.service is Service.STORE:
            route = self._to_store(call.rpc)
        else:
            key = adapter_key(call.adapter, self._tenant)
            route = Routed(
                INFERENCE, self.fleet, self._security, call.rpc, key, may_spill=call.may_spill
            )
        return route if self._tracing is None else self._tracing.trace(route, call)

    def replica_route(self, call: Call[Any] | StreamCall[Any], address: str) -> Route:
        """Returns the route to one replica of the inference service."""
        key = adapter_key(call.adapter, self._tenant)
        route: Route = ToReplica(INFERENCE, self.fleet, self._security, call.rpc, address, key)
        return route if self._tracing is None else self._tracing.trace(route, call)

    def upload_route(self) -> Route:
        """Does as `route` for the call whose request is a stream."""
        route = self._to_store(UPLOAD_RPC)
        return route if self._tracing is None else self._tracing.trace_upload(route, UPLOAD_RPC)

    def _to_store(self, rpc: str) -> Route:
        if not self._store_targets:
            raise _no_address(Service.STORE)
        if self._store_fleet is not None:
            return Routed(STORE, self._store_fleet, self._security, rpc)
        with self._opening:
            if self._store is None:
                self._store_channel = self._security.open_channel(
                    self._transport.open_channel, self._store_targets[0], OPTIONS
                )
                self._store = store_grpc.AdapterStoreServiceStub(self._store_channel)
        return Direct(STORE, self._security, getattr(self._store, rpc))

    def opened(self) -> list[Any]:
        """Returns the open channels, for the caller to close."""
        fleets = (fleet for fleet in (self._store_fleet, self._fleet) if fleet is not None)
        of_fleets = [channel for fleet in fleets for channel in fleet.channels()]
        return [*([] if self._store_channel is None else [self._store_channel]), *of_fleets]


def _no_address(service: Service) -> InvalidArgument:
    owner = STORE if service is Service.STORE else INFERENCE
    return InvalidArgument(
        f"{owner} has no address: pass {service.value}='host:port'",
        code="INVALID_ARGUMENT",
        subject=service.value,
    )
