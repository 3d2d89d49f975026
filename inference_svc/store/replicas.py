"""Chooses the store's replica for each call: by rendezvous hashing, the failing ones last.

Every key has an order of the replicas that follows from their addresses alone, so all inference
services agree on it, and each replica's memory holds its share of the images. When a replica
leaves, its keys move to the next in their own order, and no other key moves.

Policy only: no transport, and no thread. All methods are thread-safe. Where images are pulled in
another process, each process has its own `Replicas`, and they exchange their findings.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
FORGET_S = 60.0
"""Failures longer ago do not lengthen the next backoff."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica. `address` is host:port; `server_name`, the name that its certificate is for,
    where that is not the address's own host."""

    address: str
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """`pulls` counts ended streams by result."""

    address: str
    is_healthy: bool
    pulls: dict[str, int]
    pulled_bytes: int


@dataclass(slots=True)
class _Replica:
    """Ejected until `ejected_until_s`: called only when no other is left."""

    endpoint: Endpoint
    num_failures: int = 0
    failed_s: float = float("-inf")
    ejected_until_s: float = float("-inf")
    is_probed: bool = False
    pulls: Counter[str] = field(default_factory=Counter)
    pulled_bytes: int = 0


def rank(addresses: Iterable[str], key: str) -> list[str]:
    """Returns the addresses in the order in which they are tried for `key`."""
    return sorted(addresses, key=lambda address: _score(address, key), reverse=True)


def _score(address: str, key: str) -> bytes:
    return hashlib.blake2b(f"{address}\0{key}".encode(), digest_size=16).digest()


class Replicas:
    """The store's replicas, and which of them are ejected.

    A replica that fails is ejected for a time that doubles with every failure in a row. A monitor
    probes the due ones; without one, the time simply passes.
    """

    def __init__(
        self, endpoints: Iterable[Endpoint], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._publish: Callable[[Any], None] = lambda update: None
        self.num_failovers = 0
        self._shares: Counter[str] = Counter()
        self._replace(tuple(endpoints))

    @classmethod
    def at(cls, *addresses: str) -> Replicas:
        return cls(map(Endpoint, addresses))

    def publish_to(self, publish: Callable[[Any], None]) -> None:
        """From now on calls `publish` with updates, which pickle, for a counterpart's
        `on_update`."""
        self._publish = publish

    def on_update(self, update: Any) -> None:
        """Applies the updates that a counterpart has published."""
        kind, *arguments = update
        changes: dict[str, Callable[..., object]] = {
            "replace": self._replace,
            "eject": self._eject,
            "recover": self._recover,
            "admit": self._admit,
            "count_pull": self._count_pull,
            "count_failover": self._count_failover,
            "count_share": self._count_share,
        }
        changes[kind](*arguments)

    @property
    def endpoints(self) -> list[Endpoint]:
        with self._lock:
            return [replica.endpoint for replica in self._replicas.values()]

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """Replaces the set of replicas; those in both sets keep their state."""
        endpoints = tuple(endpoints)
        self._replace(endpoints)
        self._publish(("replace", endpoints))

    def _replace(self, endpoints: tuple[Endpoint, ...]) -> None:
        with self._lock:
            known = self._replicas
            self._replicas = {}
            for endpoint in endpoints:
                replica = known.get(endpoint.address) or _Replica(endpoint)
                replica.endpoint = endpoint
                self._replicas[endpoint.address] = replica

    def order(self, key: str, avoid: Collection[str] = ()) -> list[Endpoint]:
        """Returns all replicas in the order in which to try them. `avoid` are addresses that have
        just failed this caller, which need not eject them for others."""
        now_s = self._clock()
        with self._lock:
            ranked = [self._replicas[address] for address in rank(self._replicas, key)]
        ranked.sort(
            key=lambda replica: (
                now_s < replica.ejected_until_s,
                replica.endpoint.address in avoid,
            )
        )
        return [replica.endpoint for replica in ranked]

    def report_failure(self, address: str) -> None:
        """Ejects a replica that cannot be reached or serves nobody; failures while it is ejected
        count once."""
        if self._eject(address):
            self._publish(("eject", address))

    def _eject(self, address: str) -> bool:
        """Returns whether it was not ejected before."""
        with self._lock:
            replica = self._replicas.get(address)
            if replica is None or self._clock() < replica.ejected_until_s:
                return False
            self._extend_ejection(replica)
            return True

    def report_success(self, address: str) -> None:
        """Ends a replica's ejection, and forgets its failures."""
        if self._recover(address):
            self._publish(("recover", address))

    def _recover(self, address: str) -> bool:
        """Returns whether it had failures."""
        with self._lock:
            replica = self._replicas.get(address)
            if replica is None or not replica.num_failures:
                return False
            replica.num_failures, replica.ejected_until_s = 0, float("-inf")
            return True

    def pop_due(self) -> list[Endpoint]:
        """Returns ejected replicas to be probed now; each is followed by `report_probe`."""
        now_s = self._clock()
        with self._lock:
            due = [
                replica
                for replica in self._replicas.values()
                if not replica.is_probed
                and now_s < replica.ejected_until_s
                # Early enough that a failed probe is known before the ejection would end.
                and now_s >= (replica.failed_s + replica.ejected_until_s) / 2
            ]
            for replica in due:
                replica.is_probed = True
        return [replica.endpoint for replica in due]

    def report_probe(self, address: str, is_healthy: bool) -> None:
        """Ends the ejection of a healthy replica, whose failures are forgotten with the first
        successful call; extends the ejection of another."""
        with self._lock:
            replica = self._replicas.get(address)
            if replica is None:
                return
            replica.is_probed = False
            if not is_healthy:
                self._extend_ejection(replica)
        if is_healthy:
            self._admit(address)
            self._publish(("admit", address))

    def _admit(self, address: str) -> None:
        with self._lock:
            replica = self._replicas.get(address)
            if replica is not None:
                replica.ejected_until_s = self._clock()

    def count_pull(self, address: str, result: str, num_bytes: int) -> None:
        self._count_pull(address, result, num_bytes)
        self._publish(("count_pull", address, result, num_bytes))

    def _count_pull(self, address: str, result: str, num_bytes: int) -> None:
        with self._lock:
            replica = self._replicas.get(address)
            if replica is not None:
                replica.pulls[result] += 1
                replica.pulled_bytes += num_bytes

    def count_share(self, how: str) -> None:
        """Counts a pull by how its bytes went: as a file, or why not."""
        self._count_share(how)
        self._publish(("count_share", how))

    def _count_share(self, how: str) -> None:
        with self._lock:
            self._shares[how] += 1

    def shares(self) -> dict[str, int]:
        """Returns the counts of `count_share`."""
        with self._lock:
            return dict(self._shares)

    def count_failover(self) -> None:
        self._count_failover()
        self._publish(("count_failover",))

    def _count_failover(self) -> None:
        with self._lock:
            self.num_failovers += 1

    def statuses(self) -> list[ReplicaStatus]:
        now_s = self._clock()
        with self._lock:
            return [
                ReplicaStatus(
                    address,
                    now_s >= replica.ejected_until_s,
                    dict(replica.pulls),
                    replica.pulled_bytes,
                )
                for address, replica in self._replicas.items()
            ]

    def _extend_ejection(self, replica: _Replica) -> None:
        now_s = self._clock()
        if now_s - replica.failed_s > FORGET_S:
            replica.num_failures = 0
        replica.num_failures += 1
        replica.failed_s = now_s
        backoff_s = FIRST_BACKOFF_S * 2.0 ** (replica.num_failures - 1)
        replica.ejected_until_s = now_s + min(backoff_s, MAX_BACKOFF_S)
