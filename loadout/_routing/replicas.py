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
"""Of the load that a replica would have if all had the same share, this much is taken from the
keys that it is the first choice of. The rest spills over."""

SMALL_SHARE = 1 / 8
"""Of what a replica runs at once: so few requests are never worth a load elsewhere."""

DEFAULT_MAX_SEQUENCES = 64
"""Of a replica that does not publish it."""

PROBE_S = 1.0
"""How old the news of a replica may be while calls are made."""

LOAD_TTL_S = 5.0
"""A load published longer ago says nothing."""

NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`address` is a gRPC target, and the identity of the replica. `server_name` is the name that
    its certificate is for, where that is not the address's own host."""

    address: str
    server_name: str = ""


@dataclass(slots=True)
class _Replica:
    endpoint: Endpoint
    is_in: bool = True
    num_own: int = 0
    """Calls of this client in progress."""
    num_others: int = 0
    """Requests of others, when it last told its load."""
    told_s: float = NEVER_S
    max_sequences: int = 0
    failed_s: float = NEVER_S
    probed_s: float = NEVER_S
    is_probed: bool = False

    @property
    def capacity(self) -> int:
        return self.max_sequences or DEFAULT_MAX_SEQUENCES

    def num_requests(self, now_s: float) -> int:
        return self.num_own + (self.num_others if now_s - self.told_s <= LOAD_TTL_S else 0)


def rank(addresses: Iterable[str], key: str) -> list[str]:
    """The addresses in the order in which `key` asks them."""
    return sorted(addresses, key=lambda address: _score(address, key), reverse=True)


def _score(address: str, key: str) -> bytes:
    return hashlib.blake2b(f"{address}\0{key}".encode(), digest_size=16).digest()


class Replicas:
    """The replicas there are, how busy they are, and which of them are out of order.

    `lock` is for whoever keeps something beside them: two locks would be taken in both orders.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._dice = dice
        # Reentrant: a stream that is collected ends its call, also in the middle of this.
        self.lock = threading.RLock()
        self._replicas: dict[str, _Replica] = {}
        self.replace(endpoints)

    @property
    def endpoints(self) -> list[Endpoint]:
        with self.lock:
            return [replica.endpoint for replica in self._replicas.values()]

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """From now on these, at least one. What is known of those that stay is kept."""
        with self.lock:
            known = self._replicas
            self._replicas = {
                endpoint.address: known.get(endpoint.address) or _Replica(endpoint)
                for endpoint in endpoints
            }

    def begin(self, key: str, avoid: Collection[str] = (), *, may_spill: bool = True) -> Endpoint:
        """Chooses a replica for a call, which counts as in progress until its `end`.

        Calls without a key go to the least loaded one. Those in `avoid`, and those out of order,
        are asked only when no other is left.
        """
        with self.lock:
            replica = self._choose(key, avoid, may_spill)
            replica.num_own += 1
            return replica.endpoint

    def end(self, address: str) -> None:
        with self.lock:
            if replica := self._replicas.get(address):
                replica.num_own = max(0, replica.num_own - 1)

    def has_other(self, avoid: Collection[str]) -> bool:
        """Whether one that is in order is not in `avoid`."""
        with self.lock:
            return any(
                replica.is_in and address not in avoid
                for address, replica in self._replicas.items()
            )

    def told(self, address: str, load: Load | None) -> None:
        """What it published, of which the calls of this client in progress are a part."""
        with self.lock:
            replica = self._replicas.get(address)
            if replica is not None and load is not None:
                replica.num_others = max(0, load.num_requests - replica.num_own)
                replica.max_sequences = load.max_sequences
                replica.told_s = self._clock()

    def failed(self, address: str) -> None:
        """It cannot be reached, or serves nobody: out until a probe finds it well."""
        with self.lock:
            if replica := self._replicas.get(address):
                replica.is_in = False
                replica.failed_s = self._clock()

    def take_due(self) -> list[Endpoint]:
        """Those to be probed now; each ends with `probed`. None while there is no choice."""
        now_s = self._clock()
        with self.lock:
            if len(self._replicas) < 2:
                return []
            due = [
                replica
                for replica in self._replicas.values()
                if not replica.is_probed
                and now_s - max(replica.probed_s, replica.failed_s) >= PROBE_S
            ]
            for replica in due:
                replica.is_probed, replica.probed_s = True, now_s
        return [replica.endpoint for replica in due]

    def probed(self, address: str, is_well: bool, load: Load | None = None) -> None:
        with self.lock:
            replica = self._replicas.get(address)
            if replica is None:
                return
            replica.is_probed = False
            # What was asked before a failure may have been answered before it, too.
            if not is_well or replica.failed_s <= replica.probed_s:
                replica.is_in = is_well
            self.told(address, load)

    def statuses(self) -> tuple[Replica, ...]:
        now_s = self._clock()
        with self.lock:
            return tuple(
                Replica(address, each.is_in, each.num_requests(now_s), each.max_sequences)
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
        healthy = {key: value for key, value in others.items() if value.is_in}
        return healthy or others or self._replicas

    def _least_loaded(self, replicas: Iterable[_Replica], now_s: float) -> _Replica:
        """One of them by chance: many clients must not all begin with the first."""
        return min(
            replicas, key=lambda each: (each.num_requests(now_s) / each.capacity, self._dice())
        )
