"""`python -m loadout.health HOST:PORT`: exits with 0 if the service there serves, else with 1."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the command's arguments. Raises SystemExit with 2 if they are invalid."""
    parser = argparse.ArgumentParser(prog="python -m loadout.health", description=__doc__)
    parser.add_argument("address", help="host:port of the gRPC server")
    parser.add_argument("--service", default="", help="name of one service; default: the server")
    parser.add_argument("--ca", type=Path, help="CA certificates, PEM; default: no TLS")
    parser.add_argument("--cert", type=Path, help="certificate chain to show, PEM; needs --key")
    parser.add_argument("--key", type=Path, help="private key of --cert, PEM")
    parser.add_argument("--server-name", default="", help="name that the certificate must be for")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait")
    parsed = parser.parse_args(arguments)
    if (parsed.cert is None) != (parsed.key is None):
        parser.error("--cert and --key go together")
    if parsed.cert and not parsed.ca:
        parser.error("--cert needs --ca")
    return parsed


def is_serving(
    address: str,
    *,
    service: str = "",
    ca: bytes | None = None,
    identity: tuple[bytes, bytes] | None = None,
    server_name: str = "",
    timeout_s: float = 5.0,
) -> bool:
    """Returns whether a server reports SERVING.

    Args:
        address: Address of the gRPC server, "host:port".
        service: Name of one service. "": the server as a whole.
        ca: Certificates of trusted authorities, PEM. None: without TLS.
        identity: This client's certificate chain and its key, PEM.
        server_name: Name that the certificate must have. "": the address's host.
        timeout_s: Deadline in seconds.

    Raises:
        grpc.RpcError: Nothing answers, or the service is unknown.
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


def main(arguments: list[str]) -> int:
    """Runs the command, and returns its exit code."""
    options = parse_arguments(arguments)
    try:
        serves = is_serving(
            options.address,
            service=options.service,
            ca=options.ca.read_bytes() if options.ca else None,
            identity=(options.cert.read_bytes(), options.key.read_bytes())
            if options.cert
            else None,
            server_name=options.server_name,
            timeout_s=options.timeout,
        )
    except OSError as error:
        print(f"--ca, --cert or --key: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"{options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    if not serves:
        print(f"{options.address}: not serving", file=sys.stderr)
    return 0 if serves else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
