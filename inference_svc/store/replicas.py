"""Which replica of the store is asked: by rendezvous hashing, past those that are out of order.

Every key has an order of the replicas that follows from their addresses alone, so all inference
services agree on it, and each replica's memory holds its share of the images. When a replica
leaves, its keys move to the next in their own order, and no other key moves.

Policy only: no transport, and no thread. All methods may be called from any thread. Where images
are pulled in another process, each process has its own, and they tell each other what they learn.
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
    is_in: bool
    pulls: dict[str, int]
    pulled_bytes: int


@dataclass(slots=True)
class _Replica:
    """Out until `back_at_s`: asked only when no other is left."""

    endpoint: Endpoint
    num_failures: int = 0
    failed_s: float = float("-inf")
    back_at_s: float = float("-inf")
    is_probed: bool = False
    pulls: Counter[str] = field(default_factory=Counter)
    pulled_bytes: int = 0


def rank(addresses: Iterable[str], key: str) -> list[str]:
    """The addresses in the order in which `key` asks them."""
    return sorted(addresses, key=lambda address: _score(address, key), reverse=True)


def _score(address: str, key: str) -> bytes:
    return hashlib.blake2b(f"{address}\0{key}".encode(), digest_size=16).digest()


class Replicas:
    """The replicas there are, and which of them are out of order.

    A replica that fails is out for a time that doubles with every failure in a row. Whoever keeps
    an eye on them probes those that are `due`; without probes, the time simply passes.
    """

    def __init__(
        self, endpoints: Iterable[Endpoint], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._tell: Callable[[Any], None] = lambda news: None
        self.num_failovers = 0
        self._replace(tuple(endpoints))

    @classmethod
    def at(cls, *addresses: str) -> Replicas:
        return cls(map(Endpoint, addresses))

    def share(self, tell: Callable[[Any], None]) -> None:
        """From now on `tell` gets news, which pickle, for the `hear` of a counterpart."""
        self._tell = tell

    def hear(self, news: Any) -> None:
        """What a counterpart has learnt holds here, too."""
        what, *arguments = news
        changes: dict[str, Callable[..., object]] = {
            "replace": self._replace,
            "fail": self._fail,
            "recover": self._recover,
            "admit": self._admit,
            "count_pull": self._count_pull,
            "count_failover": self._count_failover,
        }
        changes[what](*arguments)

    @property
    def endpoints(self) -> list[Endpoint]:
        with self._lock:
            return [replica.endpoint for replica in self._replicas.values()]

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """From now on these. What is known of those that stay is kept."""
        endpoints = tuple(endpoints)
        self._replace(endpoints)
        self._tell(("replace", endpoints))

    def _replace(self, endpoints: tuple[Endpoint, ...]) -> None:
        with self._lock:
            known = self._replicas
            self._replicas = {}
            for endpoint in endpoints:
                replica = known.get(endpoint.address) or _Replica(endpoint)
                replica.endpoint = endpoint
                self._replicas[endpoint.address] = replica

    def order(self, key: str, avoid: Collection[str] = ()) -> list[Endpoint]:
        """All replicas, the one to ask first in front; `avoid` are addresses that have failed
        whoever asks, which need not put them out for others."""
        now_s = self._clock()
        with self._lock:
            ranked = [self._replicas[address] for address in rank(self._replicas, key)]
        ranked.sort(key=lambda replica: (now_s < replica.back_at_s, _in(replica, avoid)))
        return [replica.endpoint for replica in ranked]

    def failed(self, address: str) -> None:
        """It cannot be reached, or serves nobody. Failures while it is out count once."""
        if self._fail(address):
            self._tell(("fail", address))

    def _fail(self, address: str) -> bool:
        """Whether that puts it out."""
        with self._lock:
            replica = self._replicas.get(address)
            if replica is None or self._clock() < replica.back_at_s:
                return False
            self._put_out(replica)
            return True

    def answered(self, address: str) -> None:
        """It did what it was asked to."""
        if self._recover(address):
            self._tell(("recover", address))

    def _recover(self, address: str) -> bool:
        """Whether that is new."""
        with self._lock:
            replica = self._replicas.get(address)
            if replica is None or not replica.num_failures:
                return False
            replica.num_failures, replica.back_at_s = 0, float("-inf")
            return True

    def take_due(self) -> list[Endpoint]:
        """Those that are out and should be probed now; each ends with `probed`."""
        now_s = self._clock()
        with self._lock:
            due = [
                replica
                for replica in self._replicas.values()
                if not replica.is_probed
                and now_s < replica.back_at_s
                # So that who fails the probe is not taken for back meanwhile.
                and now_s >= (replica.failed_s + replica.back_at_s) / 2
            ]
            for replica in due:
                replica.is_probed = True
        return [replica.endpoint for replica in due]

    def probed(self, address: str, is_well: bool) -> None:
        """A replica that is well is asked again; its failures are forgotten when it answers."""
        with self._lock:
            replica = self._replicas.get(address)
            if replica is None:
                return
            replica.is_probed = False
            if not is_well:
                self._put_out(replica)
        if is_well:
            self._admit(address)
            self._tell(("admit", address))

    def _admit(self, address: str) -> None:
        with self._lock:
            replica = self._replicas.get(address)
            if replica is not None:
                replica.back_at_s = self._clock()

    def count_pull(self, address: str, result: str, num_bytes: int) -> None:
        self._count_pull(address, result, num_bytes)
        self._tell(("count_pull", address, result, num_bytes))

    def _count_pull(self, address: str, result: str, num_bytes: int) -> None:
        with self._lock:
            replica = self._replicas.get(address)
            if replica is not None:
                replica.pulls[result] += 1
                replica.pulled_bytes += num_bytes

    def count_failover(self) -> None:
        self._count_failover()
        self._tell(("count_failover",))

    def _count_failover(self) -> None:
        with self._lock:
            self.num_failovers += 1

    def statuses(self) -> list[ReplicaStatus]:
        now_s = self._clock()
        with self._lock:
            return [
                ReplicaStatus(
                    address, now_s >= replica.back_at_s, dict(replica.pulls), replica.pulled_bytes
                )
                for address, replica in self._replicas.items()
            ]

    def _put_out(self, replica: _Replica) -> None:
        now_s = self._clock()
        if now_s - replica.failed_s > FORGET_S:
            replica.num_failures = 0
        replica.num_failures += 1
        replica.failed_s = now_s
        backoff_s = FIRST_BACKOFF_S * 2.0 ** (replica.num_failures - 1)
        replica.back_at_s = now_s + min(backoff_s, MAX_BACKOFF_S)


def _in(replica: _Replica, avoid: Collection[str]) -> bool:
    return replica.endpoint.address in avoid
