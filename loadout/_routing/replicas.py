"""Which replica of the inference service a call goes to.

A key has an order of the replicas that follows from their addresses alone (rendezvous hashing), so
that all clients agree on it: an adapter is resident where its requests go, and when a replica goes
away its keys move to the next in their own order, and no other key moves. A replica that has more
than its share of the load is passed over (bounded load), so that a hot adapter spills over to the
next replica in its order.

Policy only: no transport, and no thread. All methods may be called from any thread.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from loadout._routing.metadata import Load
from loadout.types import Replica

BALANCE_FACTOR = 1.5
"""A replica takes calls of the keys that it is the first choice of up to this many times its fair
share of the load. The rest spills over."""

SMALL_SHARE = 1 / 8
"""Share of a replica's capacity below which nothing spills over: so few requests are never worth
loading the adapter elsewhere."""

DEFAULT_MAX_SEQUENCES = 64
"""Capacity of a replica that does not publish it."""

PROBE_S = 1.0
"""How old the last probe of a replica may be while calls are made."""

MAX_MISSED_PROBES = 2
"""Probes in a row without an answer in time until a replica counts as unhealthy. One says little: a
busy machine answers late, and each key that moves is an adapter loaded again."""

LOAD_TTL_S = 5.0
"""A load published longer ago is ignored."""

NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a replica.

    Args:
        address: gRPC target, and identity of the replica.
        server_name: Name in its certificate, if that is not the address's own host.
        ip: The IP address, if `address` is a name with only one.
    """

    address: str
    server_name: str = ""
    ip: str = ""


@dataclass(slots=True)
class _Replica:
    endpoint: Endpoint
    is_healthy: bool = True
    num_own: int = 0
    """Calls of this client in progress."""
    num_others: int = 0
    """Requests of other clients, when it last published its load."""
    load_s: float = NEVER_S
    max_sequences: int = 0
    failed_s: float = NEVER_S
    probed_s: float = NEVER_S
    is_probing: bool = False
    num_missed: int = 0
    """Probes in a row that it has not answered in time."""

    @property
    def capacity(self) -> int:
        return self.max_sequences or DEFAULT_MAX_SEQUENCES

    def num_requests(self, now_s: float) -> int:
        return self.num_own + (self.num_others if now_s - self.load_s <= LOAD_TTL_S else 0)


def rank(addresses: Iterable[str], key: str) -> list[str]:
    """Returns the addresses in the order in which calls with `key` try them."""
    return sorted(addresses, key=lambda address: _score(address, key), reverse=True)


def _score(address: str, key: str) -> bytes:
    return hashlib.blake2b(f"{address}\0{key}".encode(), digest_size=16).digest()


class Replicas:
    """The replicas there are, their loads, and which of them are healthy.

    `lock` also guards the owner's data per replica: two locks would be taken in both orders.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._chance = chance
        # Reentrant: a stream that is collected ends its call, also in the middle of this.
        self.lock = threading.RLock()
        self._replicas: dict[str, _Replica] = {}
        self.replace(endpoints)

    @property
    def endpoints(self) -> list[Endpoint]:
        with self.lock:
            return [replica.endpoint for replica in self._replicas.values()]

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """Sets the endpoints, at least one. Keeps health and load of endpoints that stay."""
        with self.lock:
            known, self._replicas = self._replicas, {}
            for endpoint in endpoints:
                replica = known.get(endpoint.address) or _Replica(endpoint)
                replica.endpoint = endpoint
                self._replicas[endpoint.address] = replica

    def acquire(self, key: str, avoid: Collection[str] = (), *, may_spill: bool = True) -> Endpoint:
        """Chooses a replica for a call, which counts as in progress until its `release`.

        Calls without a key go to the least loaded one. Those in `avoid`, and unhealthy ones, are
        taken only when no other is left.
        """
        with self.lock:
            replica = self._choose(key, avoid, may_spill)
            replica.num_own += 1
            return replica.endpoint

    def acquire_at(self, address: str) -> Endpoint:
        """Returns this replica, also if it has left meanwhile; the call counts as in progress until
        its `release`."""
        with self.lock:
            replica = self._replicas.get(address)
            if replica is None:
                return Endpoint(address)
            replica.num_own += 1
            return replica.endpoint

    def release(self, address: str) -> None:
        with self.lock:
            if replica := self._replicas.get(address):
                replica.num_own = max(0, replica.num_own - 1)

    def has_other(self, avoid: Collection[str]) -> bool:
        """Returns whether a healthy one is not in `avoid`."""
        with self.lock:
            return any(
                replica.is_healthy and address not in avoid
                for address, replica in self._replicas.items()
            )

    def update_load(self, address: str, load: Load | None) -> None:
        """Takes a published load, of which this client's calls in progress are a part."""
        with self.lock:
            replica = self._replicas.get(address)
            if replica is not None and load is not None:
                replica.num_others = max(0, load.num_requests - replica.num_own)
                replica.max_sequences = load.max_sequences
                replica.load_s = self._clock()

    def mark_failed(self, address: str) -> None:
        """Takes a replica that cannot be reached, or drains, out until a probe finds it healthy."""
        with self.lock:
            if replica := self._replicas.get(address):
                replica.is_healthy = False
                replica.failed_s = self._clock()

    def mark_healthy(self, address: str) -> None:
        """Marks a replica as healthy that has just answered, because a single replica is not
        probed."""
        with self.lock:
            if replica := self._replicas.get(address):
                replica.is_healthy = True

    def pop_due(self) -> list[Endpoint]:
        """Returns the endpoints to probe now; each probe ends with `record_probe`. Returns none
        if there is only one replica."""
        now_s = self._clock()
        with self.lock:
            if len(self._replicas) < 2:
                return []
            due = [
                replica
                for replica in self._replicas.values()
                if not replica.is_probing
                and now_s - max(replica.probed_s, replica.failed_s) >= PROBE_S
            ]
            for replica in due:
                replica.is_probing, replica.probed_s = True, now_s
        return [replica.endpoint for replica in due]

    def record_probe(self, address: str, is_healthy: bool | None, load: Load | None = None) -> None:
        """Records the end of a probe; `is_healthy` is None if no answer came in time."""
        with self.lock:
            replica = self._replicas.get(address)
            if replica is None:
                return
            replica.is_probing = False
            replica.num_missed = replica.num_missed + 1 if is_healthy is None else 0
            if is_healthy is None and replica.num_missed < MAX_MISSED_PROBES:
                return
            # A probe sent before a failure may also have been answered before it.
            if not is_healthy or replica.failed_s <= replica.probed_s:
                replica.is_healthy = bool(is_healthy)
            self.update_load(address, load)

    def statuses(self) -> tuple[Replica, ...]:
        now_s = self._clock()
        with self.lock:
            return tuple(
                Replica(address, each.is_healthy, each.num_requests(now_s), each.max_sequences)
                for address, each in self._replicas.items()
            )

    def _choose(self, key: str, avoid: Collection[str], may_spill: bool) -> _Replica:
        now_s = self._clock()
        candidates = self._candidates(avoid)
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        if not key:
            return self._least_loaded(candidates.values(), now_s)
        ordered = [candidates[address] for address in rank(candidates, key)]
        if not may_spill:
            return ordered[0]
        num_requests = 1 + sum(replica.num_requests(now_s) for replica in ordered)
        capacity = sum(replica.capacity for replica in ordered)
        for replica in ordered:
            share = max(BALANCE_FACTOR * num_requests / capacity, SMALL_SHARE)
            if replica.num_requests(now_s) < share * replica.capacity:
                return replica
        return self._least_loaded(ordered, now_s)

    def _candidates(self, avoid: Collection[str]) -> dict[str, _Replica]:
        others = {key: value for key, value in self._replicas.items() if key not in avoid}
        healthy = {key: value for key, value in others.items() if value.is_healthy}
        return healthy or others or self._replicas

    def _least_loaded(self, replicas: Iterable[_Replica], now_s: float) -> _Replica:
        """Breaks ties by chance: many clients must not all begin with the first."""
        return min(
            replicas, key=lambda each: (each.num_requests(now_s) / each.capacity, self._chance())
        )
