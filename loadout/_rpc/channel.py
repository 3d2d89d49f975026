"""What both clients ask of a gRPC channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from loadout._routing.addresses import split
from loadout._routing.fleet import AsyncFleet, BlockingFleet, Fleet
from loadout._routing.metadata import adapter_key, check_tenant
from loadout._routing.route import Direct, Route, Routed
from loadout._rpc.calls import Call, Service, StreamCall
from loadout._rpc.tracing import Tracing
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.errors import InvalidArgument
from loadout.security import Security

Address = str | Sequence[str]
"""One gRPC target, several with commas between them, or a sequence of them."""

DEFAULT_TIMEOUT_S = 300.0

UPLOAD_RPC = "UploadAdapter"

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A page of 1000 adapters with long labels exceeds gRPC's default of 4 MiB."""

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted service is found again within the retries of one call.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A new client does not inherit the patience that another's failed attempts have used up.
    ("grpc.use_local_subchannel_pool", 1),
)


class Stubs:
    """The ways to the services that this client has an address for; channels are opened on first
    use.

    `api` is `grpc` or `grpc.aio`; `tenant` is whose an adapter's name without one is. Raises as
    Security.check, addresses.split and routing.check_tenant.
    """

    def __init__(
        self,
        api: Any,
        inference: Address | None,
        store: str | None,
        security: Security,
        tenant: str,
        tracing: Tracing | None = None,
    ) -> None:
        check_tenant(tenant)
        self._api = api
        self._security = security
        self._tenant = tenant
        self._tracing = tracing
        self._store_address = store
        if store:
            security.check("store", store)
        self._store: Any = None
        self._store_channels: list[Any] = []
        self._fleet: Fleet | None = None
        if inference:
            targets = split("inference", inference)
            for target in targets:
                security.check("inference", target)
            kind = BlockingFleet if api is grpc else AsyncFleet
            self._fleet = kind(api, targets, security, OPTIONS)

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
        return route if self._tracing is None else self._tracing.follow(route, call)

    def to_upload(self) -> Route:
        """As `route`, for the call whose request is a stream."""
        route, rpc = self._to_store(UPLOAD_RPC), UPLOAD_RPC
        return route if self._tracing is None else self._tracing.follow_upload(route, rpc)

    def _to_store(self, rpc: str) -> Direct:
        if self._store is None:
            if not self._store_address:
                raise _no_address(Service.STORE)
            channel = self._security.open_channel(self._api, self._store_address, OPTIONS)
            self._store_channels.append(channel)
            self._store = store_grpc.AdapterStoreServiceStub(channel)
        return Direct(self._security, getattr(self._store, rpc))

    async def end_probes(self) -> None:
        """For `grpc.aio`, before the channels are closed."""
        if isinstance(self._fleet, AsyncFleet):
            await self._fleet.end_probes()

    def open_channels(self) -> list[Any]:
        """For the caller to close: nothing can be called then."""
        fleet = [] if self._fleet is None else self._fleet.open_channels()
        return [*self._store_channels, *fleet]


def _no_address(service: Service) -> InvalidArgument:
    owner = "the adapter store" if service is Service.STORE else "the inference service"
    return InvalidArgument(
        f"{owner} has no address: pass {service.value}='host:port'",
        code="INVALID_ARGUMENT",
        subject=service.value,
    )
