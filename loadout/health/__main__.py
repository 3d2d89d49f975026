"""`python -m loadout.health HOST:PORT`: exits with 0 if the service there serves, else with 1."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc

from loadout.health import is_serving


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadout.health", description=__doc__)
    parser.add_argument("address", help="host:port of the gRPC server")
    parser.add_argument("--service", default="", help="name of one service; default: the server")
    parser.add_argument("--ca", type=Path, help="CA certificates, PEM; default: no TLS")
    parser.add_argument("--server-name", default="", help="name that the certificate must be for")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    wanted = parse_arguments(arguments)
    try:
        serves = is_serving(
            wanted.address,
            service=wanted.service,
            ca=wanted.ca.read_bytes() if wanted.ca else None,
            server_name=wanted.server_name,
            timeout_s=wanted.timeout,
        )
    except OSError as error:
        print(f"--ca: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"{wanted.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    if not serves:
        print(f"{wanted.address}: not serving", file=sys.stderr)
    return 0 if serves else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
