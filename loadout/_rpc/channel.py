"""The channels to both services, and the route of each call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from loadout._routing.addresses import split
from loadout._routing.fleet import Fleet, Transport
from loadout._routing.metadata import adapter_key, check_tenant
from loadout._rpc.calls import Call, Service, StreamCall
from loadout._rpc.route import Direct, Route, Routed
from loadout._rpc.tracing import Tracing
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.errors import InvalidArgument
from loadout.security import ChannelOptions, Security

Address = str | Sequence[str]
"""One gRPC target, several with commas between them, or a sequence of them."""

DEFAULT_TIMEOUT_S = 300.0

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
        store: str | None,
        security: Security,
        tenant: str,
        tracing: Tracing | None = None,
    ) -> None:
        check_tenant(tenant)
        self._transport = transport
        self._security = security
        self._tenant = tenant
        self._tracing = tracing
        self._store_address = store
        if store:
            security.check("store", store)
        self._opening = threading.Lock()  # a client may be shared between threads
        self._store: Any = None
        self._store_channel: Any = None
        self._fleet: Fleet | None = None
        if inference:
            targets = split("inference", inference)
            for target in targets:
                security.check("inference", target)
            self._fleet = Fleet(transport, targets, security, OPTIONS)

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
            route = Routed(self.fleet, self._security, call.rpc, key, may_spill=call.may_spill)
        return route if self._tracing is None else self._tracing.trace(route, call)

    def upload_route(self) -> Route:
        """Does as `route` for the call whose request is a stream."""
        route = self._to_store(UPLOAD_RPC)
        return route if self._tracing is None else self._tracing.trace_upload(route, UPLOAD_RPC)

    def _to_store(self, rpc: str) -> Direct:
        if not self._store_address:
            raise _no_address(Service.STORE)
        with self._opening:
            if self._store is None:
                self._store_channel = self._security.open_channel(
                    self._transport.open_channel, self._store_address, OPTIONS
                )
                self._store = store_grpc.AdapterStoreServiceStub(self._store_channel)
        return Direct(self._security, getattr(self._store, rpc))

    def opened(self) -> list[Any]:
        """Returns the open channels, for the caller to close."""
        fleet = [] if self._fleet is None else self._fleet.channels()
        return [*([] if self._store_channel is None else [self._store_channel]), *fleet]


def _no_address(service: Service) -> InvalidArgument:
    owner = "the adapter store" if service is Service.STORE else "the inference service"
    return InvalidArgument(
        f"{owner} has no address: pass {service.value}='host:port'",
        code="INVALID_ARGUMENT",
        subject=service.value,
    )
