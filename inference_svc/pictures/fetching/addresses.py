"""The addresses of a host, of which a server never connects to some.

A name's owner decides its addresses, and may choose one of this machine's or this network's: a URL
of an allowed name would then reach a service that trusts its callers by where they are.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from inference_svc.pictures.fetching.hosts import Origin

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Lookup = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host with a port, at once or after seconds. Raises OSError."""

METADATA = frozenset(
    ipaddress.ip_address(each)
    for each in (
        *("169.254.169.254", "fd00:ec2::254", "fd20:ce::254"),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
"""Where clouds give a machine its credentials, or answer its agents."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NEVER = tuple(
    ipaddress.ip_network(each)
    for each in (
        *("0.0.0.0/8", "192.0.0.0/24", "240.0.0.0/4", "::/96", "::ffff:0:0:0/96"),
        *("64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10"),
    )
)
"""This network, reserved ones, and tunnels or translators whose other end is in the address: a
network may choose where in the address its own (64:ff9b:1::/48) have it."""


class AddressRefused(Exception):
    """The host has an address that the server does not connect to. The text is for operators."""


def look_up(host: str, port: int) -> Sequence[str]:
    """Returns the addresses of a name. Blocks. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_addresses(origin: Origin, found: Sequence[str]) -> None:
    """Raises AddressRefused if one of the addresses that a name has now is not for a stranger to
    choose. Without TLS nothing proves that a host has the name in the URL, so that a name there
    may have public addresses alone."""
    for text in found:
        address = _inner(ipaddress.ip_address(text))
        if _is_refused(address) or (origin.scheme == "http" and not address.is_global):
            raise AddressRefused(f"{origin.host} has the address {text}")


def _is_refused(address: Address) -> bool:
    return (
        address in METADATA
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or any(address.version == each.version and address in each for each in _NEVER)
    )


def _inner(address: Address) -> Address:
    """Returns the IPv4 address within one of IPv6, if it leads there."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address
