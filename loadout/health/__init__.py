"""Asks a service whether it serves: for probes that have to speak TLS, and for compose."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(
    address: str,
    *,
    service: str = "",
    ca: bytes | None = None,
    identity: tuple[bytes, bytes] | None = None,
    server_name: str = "",
    timeout_s: float = 5.0,
) -> bool:
    """Whether the server at `address` (host:port) says SERVING for `service`; "" stands for all.

    `ca` None: no TLS. `identity`: a certificate chain and its key, for a server that asks for one,
    PEM. `server_name`: whom the certificate must be for, if not the address's host.
    Raises grpc.RpcError where nobody answers, or nobody knows the service.
    """
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    if ca is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        chain, key = identity or (None, None)
        credentials = grpc.ssl_channel_credentials(ca, key, chain)
        channel = grpc.secure_channel(address, credentials, options=options)
    with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
