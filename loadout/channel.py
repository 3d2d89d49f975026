"""What both clients ask of a gRPC channel."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.calls import Service
from loadout.errors import InvalidArgument
from loadout.inference.v1 import inference_pb2_grpc as inference_grpc
from loadout.security import Security

DEFAULT_TIMEOUT_S = 300.0

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

STUBS = MappingProxyType(
    {
        Service.STORE: store_grpc.AdapterStoreServiceStub,
        Service.INFERENCE: inference_grpc.InferenceServiceStub,
    }
)


class Stubs:
    """The stubs of the services this client has an address for, made on first use.

    `api` is `grpc` or `grpc.aio`. Raises as Security.check.
    """

    def __init__(self, api: Any, addresses: dict[Service, str | None], security: Security) -> None:
        for service, address in addresses.items():
            if address:
                security.check(service.value, address)
        self._api = api
        self._addresses = addresses
        self._security = security
        self._stubs: dict[Service, Any] = {}
        self.channels: list[Any] = []

    def method(self, service: Service, rpc: str) -> Any:
        """Raises InvalidArgument if the client was made without this service's address."""
        if service not in self._stubs:
            self._stubs[service] = STUBS[service](self._channel(service))
        return self._security.sign(getattr(self._stubs[service], rpc))

    def _channel(self, service: Service) -> Any:
        address = self._addresses[service]
        if not address:
            raise InvalidArgument(
                f"{rpc_owner(service)} has no address: pass {service.value}='host:port'",
                code="INVALID_ARGUMENT",
                subject=service.value,
            )
        channel = self._security.open_channel(self._api, address, OPTIONS)
        self.channels.append(channel)
        return channel


def rpc_owner(service: Service) -> str:
    return "the adapter store" if service is Service.STORE else "the inference service"
