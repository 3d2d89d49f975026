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
    parser.add_argument("--cert", type=Path, help="certificate chain to show, PEM; needs --key")
    parser.add_argument("--key", type=Path, help="private key of --cert, PEM")
    parser.add_argument("--server-name", default="", help="name that the certificate must be for")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait")
    found = parser.parse_args(arguments)
    if (found.cert is None) != (found.key is None):
        parser.error("--cert and --key go together")
    if found.cert and not found.ca:
        parser.error("--cert needs --ca")
    return found


def main(arguments: list[str]) -> int:
    wanted = parse_arguments(arguments)
    try:
        serves = is_serving(
            wanted.address,
            service=wanted.service,
            ca=wanted.ca.read_bytes() if wanted.ca else None,
            identity=(wanted.cert.read_bytes(), wanted.key.read_bytes()) if wanted.cert else None,
            server_name=wanted.server_name,
            timeout_s=wanted.timeout,
        )
    except OSError as error:
        print(f"--ca, --cert or --key: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"{wanted.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    if not serves:
        print(f"{wanted.address}: not serving", file=sys.stderr)
    return 0 if serves else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
