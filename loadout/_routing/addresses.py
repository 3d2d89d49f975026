"""Resolves the address of a service: one target, several, or a name that resolves to several."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from loadout._routing.replicas import Endpoint
from loadout.errors import InvalidArgument

RESOLVE_S = 5.0
"""How long a resolved name is used: about as long as clusters cache the addresses of pods."""

_URL = re.compile(r"(?i:https?)://(?P<host>[^/]*).*")
_USER = re.compile(r"(?<=://)[^\s,]*@")
"""User and password before the host of a web address."""
_NO_PORT = re.compile(r"[\w.-]+|\[[^]]*\]")  # gRPC would take 443
_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")


def split(argument: str, address: str | Sequence[str]) -> list[str]:
    """Returns the targets of an address, each once. Raises InvalidArgument, naming the argument."""
    if isinstance(address, str):
        # gRPC writes one target of several IP addresses with commas, too.
        targets = [address] if _SCHEME.match(address) else address.split(",")
    else:
        targets = list(address)
    targets = [target.strip() for target in targets]
    if not all(targets):
        raise InvalidArgument(
            f"{argument}: {_USER.sub('', repr(address))} has an empty address",
            code="INVALID_ARGUMENT",
            subject=argument,
        )
    for target in targets:
        url = _URL.fullmatch(_USER.sub("", target))
        if url is not None:
            raise InvalidArgument(
                f"{argument}: {url[0]} is a web address; give the gRPC address as "
                f"HOST:PORT, without http://, such as {url['host']}",
                code="INVALID_ARGUMENT",
                subject=argument,
            )
        if _NO_PORT.fullmatch(target):
            port = 7070 if argument == "store" else 7080
            raise InvalidArgument(
                f"{argument}: {target} has no port; give HOST:PORT, such as {target}:{port}",
                code="INVALID_ARGUMENT",
                subject=argument,
            )
    return list(dict.fromkeys(targets))


def lookup(host: str, port: str) -> list[str]:
    """Returns the IP addresses of a host. Raises OSError. Blocks."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def resolve(target: str) -> list[Endpoint]:
    """Returns the replicas behind a name with a port, sorted; the name itself if there is only one.
    It has another channel then with each other address: gRPC itself would look for one only after
    the former has failed, and not more often than twice a minute.

    Where a name has addresses of both families, the IPv4 ones are taken: two families are not two
    replicas. Raises OSError, or ValueError for an invalid name. Blocks.
    """
    host, _, port = target.rpartition(":")
    ips = set(lookup(host, port))
    family = sorted(ip for ip in ips if ":" not in ip) or sorted(ips)
    if len(family) < 2:
        return [Endpoint(target, ip=family[0])]
    return [Endpoint(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in family]


def is_name(target: str) -> bool:
    """Returns whether a target is a host name with a port, which may resolve to several addresses.
    localhost is not: its two addresses are one server."""
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdecimal() or _SCHEME.match(target) or host == "localhost":
        return False
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return False


class Resolver:
    """Keeps the endpoints behind one name current, in threads: `on_change` is called in one.

    `first` is done when the name was first resolved, or could not be.
    """

    def __init__(
        self,
        target: str,
        on_change: Callable[[list[Endpoint]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first: Future[None] = Future()
        self._target = target
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._latest = self.first
        self._started_s = float("-inf")
        self._start()

    def refresh(self) -> Future[None]:
        """Resolves again if that was long ago; returns at once, with the latest resolution, which
        may be in progress."""
        with self._lock:
            is_due = self._clock() - self._started_s >= RESOLVE_S
            if not is_due or not self._latest.done():
                return self._latest
            self._latest = Future()
            return self._start()

    def _start(self) -> Future[None]:
        self._started_s = self._clock()
        args = (self._latest,)
        threading.Thread(target=self._run, args=args, name="loadout-resolve", daemon=True).start()
        return self._latest

    def _run(self, resolution: Future[None]) -> None:
        try:
            self._on_change(resolve(self._target))
        except (OSError, ValueError):
            pass  # former addresses are better than none, and gRPC reports the fault
        finally:
            resolution.set_result(None)
