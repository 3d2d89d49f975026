"""The settings that all services have, and how settings are read."""

from __future__ import annotations

from urllib.parse import urlsplit


def split_address(address: str) -> tuple[str, int]:
    """Returns "HOST:PORT" or "[V6]:PORT" as (host, port). Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_endpoint(value: str) -> str:
    """Returns the address of a receiver of spans, "" for none. Raises ValueError."""
    found = urlsplit(value)
    if value and not (found.scheme in ("http", "https") and found.hostname and found.port):
        raise ValueError(f"{value!r} is not http(s)://HOST:PORT")
    return value
