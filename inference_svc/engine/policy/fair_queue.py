"""All waiting sequences: tenants are served in rounds, by tokens, each in its own order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set

from inference_svc.core import AdapterKey, Sequence
from inference_svc.engine.policy.prices import FREE, Prices
from inference_svc.engine.policy.round_robin import DeficitRoundRobin
from inference_svc.engine.policy.tenant_queue import Flow, TenantQueue

GENERATED_WEIGHT = 2
"""The cost of a generated token in prompt tokens: it reads all weights and pages by itself."""


class FairQueue:
    """Sequences that do not run. A step visits only the ones that it starts, never all.

    Sequences whose adapter is not resident are parked, by key: they cost a step nothing. A
    tenant, and within it an adapter, may take `quantum` tokens per round, at `prices`. Tokens to
    compute are charged whenever a sequence starts; tokens that it may generate only the first time,
    and refunded if it ends earlier; sorting for its tokens, and computing its pictures, as they
    come. After `ageing_s` a sequence is aged: half of its tenant's tokens go to aged ones, in order
    of arrival.
    """

    def __init__(self, quantum: int, ageing_s: float, prices: Prices = FREE) -> None:
        self._quantum = quantum
        self._ageing_s = ageing_s
        self._prices = prices
        self._tenants: dict[str, TenantQueue] = {}
        self.turns = AdapterTurns()
        self._round_robin = DeficitRoundRobin[str](quantum)  # of tenants with ready sequences
        self._flows: dict[AdapterKey, dict[Flow, None]] = {}  # by key, in order of arrival
        self._parked: set[AdapterKey] = set()
        self.num_ready = 0
        self.num_parked = 0
        self.ready_tokens = 0
        self.num_parked_tenants = 0
        self.num_left_parked = 0  # ever unparked, or removed while parked

    def __len__(self) -> int:
        return self.num_ready + self.num_parked

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._tenants.values():
            yield from tenant

    @property
    def num_ready_tenants(self) -> int:
        return len(self._round_robin)

    def tenant(self, name: str) -> TenantQueue | None:
        """Returns the tenant's waiting sequences; None if there are none."""
        return self._tenants.get(name)

    def ready_tenants(self) -> Iterator[TenantQueue]:
        """Iterates over the tenants that have a sequence which may start."""
        return (tenant for tenant in self._tenants.values() if tenant.num_ready)

    def is_near(self, tenant: TenantQueue) -> bool:
        """Whether a tenant that has a sequence which may start is served in this round, or the next
        one: it has not had more than the others."""
        return self._round_robin.is_near(tenant.name)

    def keys(self) -> list[AdapterKey]:
        """Returns the adapters of waiting sequences, in no order."""
        return [key for key in self._flows if key]

    def of_key(self, key: AdapterKey) -> list[Sequence]:
        """Returns the waiting sequences of this adapter."""
        return [s for flow in self._flows.get(key, ()) for s in flow.sequences]

    def has(self, key: AdapterKey) -> bool:
        """Whether a sequence of this adapter waits."""
        return key in self._flows

    def is_parked(self, key: AdapterKey) -> bool:
        return key in self._parked

    def is_aged(self, sequence: Sequence, now_s: float) -> bool:
        return sequence.request.arrival_s <= self.aged_s(now_s)

    def aged_s(self, now_s: float) -> float:
        """Sequences that arrived at this time or before are aged."""
        return now_s - self._ageing_s

    def next_ageing_s(self, now_s: float) -> float | None:
        """Returns when the next waiting sequence of an adapter becomes aged. Visits all of them."""
        waiting = (
            sequence.request.arrival_s for key in self.keys() for sequence in self.of_key(key)
        )
        aged_s = self.aged_s(now_s)
        arrival_s = min((each for each in waiting if each > aged_s), default=None)
        return None if arrival_s is None else arrival_s + self._ageing_s

    # Adding and removing sequences.

    def add(self, sequence: Sequence) -> None:
        name, key = sequence.request.tenant, sequence.request.key
        if name not in self._tenants:
            self._tenants[name] = TenantQueue(name, self._quantum)
        tenant = self._tenants[name]
        with _Recount(self, tenant):
            flow = tenant.add(sequence, self.is_parked(key))
        self._flows.setdefault(key, {})[flow] = None
        if key:
            self.turns.add(tenant)

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.request.tenant]
        with _Recount(self, tenant):
            flow = tenant.remove(sequence)
        self.num_left_parked += flow.is_parked
        if not flow.sequences:
            flows = self._flows[flow.key]
            del flows[flow]
            if not flows:
                del self._flows[flow.key]
                self._parked.discard(flow.key)
        if not tenant.has_adapters:
            self.turns.discard(tenant)
        if not tenant:
            del self._tenants[tenant.name]

    def park(self, key: AdapterKey) -> None:
        """Holds the adapter's sequences back until `unpark`. At least one must wait."""
        self._parked.add(key)
        self._move(key)

    def unpark(self, key: AdapterKey) -> None:
        self._parked.discard(key)
        self._move(key)

    def _move(self, key: AdapterKey) -> None:
        for flow in self._flows.get(key, ()):
            if flow.is_parked != self.is_parked(key):
                tenant = self._tenants[flow.tenant]
                with _Recount(self, tenant):
                    tenant.move(flow, not flow.is_parked)
                if not flow.is_parked:
                    self.num_left_parked += len(flow.sequences)

    # Order.

    def first(self, now_s: float) -> Sequence | None:
        """Returns the sequence to start next."""
        name = self._round_robin.first()
        return None if name is None else self._tenants[name].first(self.aged_s(now_s))

    def start(self, sequence: Sequence, num_tokens: int) -> None:
        """Removes a sequence that starts; `num_tokens` of its known ones are to be computed."""
        tenant = self._tenants[sequence.request.tenant]
        charge = math.ceil(num_tokens * self._prices.of_prompt(sequence))
        if not sequence.is_charged:
            sequence.is_charged = True
            sequence.charged_per_token = GENERATED_WEIGHT + self._prices.of_choice(sequence)
            charge += _price_of_remaining(sequence)
        # Also for a sequence that was computed before: or a round would never end in which one
        # tenant's are computed again and again.
        tenant.started(sequence, charge)
        self._round_robin.charge(tenant.name, charge)
        was_oldest = tenant.oldest is sequence
        self.remove(sequence)
        # Else its adapter would be evicted before it can start.
        if was_oldest and tenant.has_adapters:
            self.turns.put_last(tenant)

    def ended(self, sequence: Sequence) -> None:
        """Refunds tokens that the sequence was charged for and has not generated."""
        if sequence.is_charged:
            self.charge(sequence, -_price_of_remaining(sequence))

    def sorted_for(self, sequence: Sequence) -> None:
        """Charges for the sorting of the vocabulary that the last token took: nobody knows before
        for which tokens it is sorted."""
        count, price = sequence.num_output, self._prices.sort
        # The parts of tokens add up.
        self.charge(sequence, int(count * price) - int((count - 1) * price))

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charges for work that nobody knew of when the sequence started, such as computing its
        pictures: others may have computed them."""
        self._round_robin.charge(sequence.request.tenant, num_tokens)
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is not None:
            tenant.charge(sequence, num_tokens)

    def check_integrity(self) -> None:
        """Asserts that tenants, flows and counts agree."""
        flows = [flow for found in self._flows.values() for flow in found]
        assert {id(s) for flow in flows for s in flow.sequences} == {id(s) for s in self}
        assert self._parked <= set(self._flows)
        assert self.turns.names <= self._tenants.keys()
        assert all(flow.is_parked == (flow.key in self._parked) for flow in flows)
        for name, tenant in self._tenants.items():
            tenant.check_integrity()
            assert len(tenant) > 0, "a tenant without waiting sequences"
            assert (name in self.turns.names) == tenant.has_adapters
            assert (name in self._round_robin) == (tenant.num_ready > 0)
        tenants = self._tenants.values()
        assert self.num_ready == sum(tenant.num_ready for tenant in tenants)
        assert self.num_parked == sum(tenant.num_parked for tenant in tenants)
        assert self.num_parked_tenants == sum(tenant.num_parked > 0 for tenant in tenants)
        assert self.ready_tokens == sum(tenant.ready_tokens for tenant in tenants)


def _price_of_remaining(sequence: Sequence) -> int:
    """Returns the price of the tokens that a charged sequence may still generate, as it was charged
    for them."""
    num_remaining = max(0, sequence.request.sampling.max_tokens - sequence.num_output)
    return math.ceil(num_remaining * sequence.charged_per_token)


class AdapterTurns:
    """Tenants with waiting sequences of adapters, longest waiting first."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantQueue] = {}

    @property
    def names(self) -> Set[str]:
        return self._tenants.keys()

    def add(self, tenant: TenantQueue) -> None:
        """Adds a tenant behind the others, if it is not there."""
        self._tenants.setdefault(tenant.name, tenant)

    def discard(self, tenant: TenantQueue) -> None:
        self._tenants.pop(tenant.name, None)

    def put_last(self, tenant: TenantQueue) -> None:
        """Moves a tenant behind the others: it has had its turn."""
        self._tenants[tenant.name] = self._tenants.pop(tenant.name)

    def in_order(self, aged_s: float) -> Iterator[tuple[AdapterKey, bool]]:
        """Yields the keys of waiting sequences in the order in which their adapters are due, and
        whether the sequence at that place is aged: first the aged ones, one of each tenant after
        the other, then the rest. May yield a key twice. The queue must not change meanwhile. See
        `FairQueue.aged_s`."""
        for key in self._interleave(lambda tenant: tenant.aged_keys(aged_s)):
            yield key, True
        for key in self._interleave(lambda tenant: tenant.young_keys(aged_s)):
            yield key, False

    def _interleave(
        self, keys: Callable[[TenantQueue], Iterator[AdapterKey]]
    ) -> Iterator[AdapterKey]:
        """Yields the first key of each tenant, then the second of each, and so on."""
        current: Iterator[Iterator[AdapterKey]] = map(keys, self._tenants.values())
        while True:
            remaining = []
            for found in current:
                for key in found:
                    remaining.append(found)
                    if key:
                        yield key
                    break
            if not remaining:
                return
            current = iter(remaining)


class _Recount:
    """Updates the sums over tenants, and the round robin, after one tenant changes."""

    def __init__(self, queue: FairQueue, tenant: TenantQueue) -> None:
        self._queue = queue
        self._tenant = tenant

    def __enter__(self) -> None:
        self._add(-1)

    def __exit__(self, *error: object) -> None:
        self._add(1)
        round_robin, name = self._queue._round_robin, self._tenant.name
        if self._tenant.num_ready:
            round_robin.enter(name)
        elif name in round_robin:
            round_robin.leave(name)

    def _add(self, sign: int) -> None:
        self._queue.num_ready += sign * self._tenant.num_ready
        self._queue.num_parked += sign * self._tenant.num_parked
        self._queue.num_parked_tenants += sign * (self._tenant.num_parked > 0)
        self._queue.ready_tokens += sign * self._tenant.ready_tokens
