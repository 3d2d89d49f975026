"""Keeps the set of replicas current: resolves the store's name, and probes ejected replicas."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from inference_svc.store.replicas import Endpoint, Replicas
from servicekit.settings.addresses import split_address

logger = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
"""About as long as the addresses of pods are cached in a cluster."""
PROBE_POLL_SECONDS = 0.1

Lookup = Callable[[str, int], Iterable[str]]


def look_up_host(host: str, port: int) -> list[str]:
    """Returns the IP addresses of a host. Raises OSError. Blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in found]


def resolve(addresses: Sequence[str], lookup: Lookup = look_up_host) -> list[Endpoint]:
    """Returns the replicas behind addresses, each once; sorted where a name has several.

    A name with one address is left to the channel. If a name has addresses of both families, the
    IPv4 ones are used: two families are not two replicas. Raises OSError. Blocks.
    """
    endpoints: dict[str, Endpoint] = {}
    for address in addresses:
        host, port = split_address(address)
        ips = [] if _is_literal(host) else _one_family(lookup(host, port))
        found = [Endpoint(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in ips]
        for endpoint in found if len(found) > 1 else [Endpoint(address)]:
            endpoints.setdefault(endpoint.address, endpoint)
    return list(endpoints.values())


def _is_literal(host: str) -> bool:
    """Returns whether this is an IP address, or localhost, whose two addresses are one server."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _one_family(ips: Iterable[str]) -> list[str]:
    by_family: dict[bool, set[str]] = {False: set(), True: set()}
    for ip in ips:
        by_family[":" in ip].add(ip)
    return sorted(by_family[False] or by_family[True])


class ReplicaMonitor:
    """`probe` returns whether a replica is healthy; it does not raise."""

    def __init__(
        self,
        replicas: Replicas,
        addresses: Sequence[str],
        probe: Callable[[Endpoint], Awaitable[bool]],
        lookup: Lookup = look_up_host,
    ) -> None:
        self._replicas = replicas
        self._addresses = addresses
        self._probe = probe
        self._lookup = lookup

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if not all(_is_literal(split_address(address)[0]) for address in self._addresses):
                tasks.create_task(self._keep_resolving())
            while True:
                for endpoint in self._replicas.pop_due():
                    tasks.create_task(self._probe_one(endpoint))
                await asyncio.sleep(PROBE_POLL_SECONDS)

    async def _keep_resolving(self) -> None:
        is_failing = False
        while True:
            try:
                found = await asyncio.to_thread(resolve, self._addresses, self._lookup)
                is_failing = False
                self._replace(found)
            except (OSError, ValueError) as error:  # ValueError: not a valid host name
                # The previous addresses are better than none.
                if not is_failing:
                    logger.warning("the store's name does not resolve: %s", error)
                is_failing = True
            await asyncio.sleep(RESOLVE_SECONDS)

    def _replace(self, found: list[Endpoint]) -> None:
        before = {endpoint.address for endpoint in self._replicas.endpoints}
        now = {endpoint.address for endpoint in found}
        if before != now:
            logger.info("the store is at %s", ", ".join(sorted(now)))
            self._replicas.replace(found)

    async def _probe_one(self, endpoint: Endpoint) -> None:
        is_healthy = False
        try:
            is_healthy = await self._probe(endpoint)
        except Exception:  # one failed probe must not end the monitor
            logger.exception("probing the store at %s failed", endpoint.address)
        if is_healthy:
            logger.info("the store at %s answers", endpoint.address)
        self._replicas.report_probe(endpoint.address, is_healthy)
