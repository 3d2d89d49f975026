"""The waiting sequences of one tenant: by priority, then round robin over adapters, and half of the
tokens for aged ones."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from inference_svc.core import AdapterKey, Sequence
from inference_svc.engine.policy.round_robin import DeficitRoundRobin

_serials = itertools.count()


@dataclass(eq=False, slots=True)
class Flow:
    """A tenant's waiting sequences of one priority and one adapter, in order of arrival.

    Sequences of a parked flow may not start: their adapter is not schedulable.
    """

    tenant: str
    priority: int
    key: AdapterKey
    is_parked: bool
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens to compute; some of them may be in the prefix cache."""
    serial: int = field(default_factory=lambda: next(_serials))
    arrival_s: float = 0.0
    """Arrival of the first sequence, when the flow was last inserted into the orders."""

    @property
    def by_age(self) -> tuple[float, int, Flow]:
        return self.arrival_s, self.serial, self

    @property
    def by_rank(self) -> tuple[int, float, int, Flow]:
        return -self.priority, self.arrival_s, self.serial, self


def arrival_s(sequence: Sequence) -> float:
    return sequence.request.arrival_s


class TenantQueue:
    """Flows in several orders. Each operation is logarithmic in their number.

    While a sequence is aged, half of the tokens go to aged ones in order of arrival, the other half
    to the highest priority, round robin over its adapters: a backlog, of a low priority or of one
    adapter, neither starves nor delays others. Before an aged sequence starts, the round robin
    takes no more than the sequences that arrived before it, and one request.
    """

    def __init__(self, name: str, quantum: int) -> None:
        self.name = name
        self._quantum = quantum
        self._flows: dict[tuple[int, AdapterKey], Flow] = {}
        self._by_age: list[tuple[float, int, Flow]] = []  # of flows with an adapter
        self._by_rank: list[tuple[int, float, int, Flow]] = []
        self._ready_by_age: list[tuple[float, int, Flow]] = []
        self._levels: dict[int, DeficitRoundRobin[AdapterKey]] = {}  # of ready flows
        self._priorities: list[int] = []  # of the levels, ascending
        self._aged_lead = 0  # tokens of aged ones, less the round robin's
        self._aged_sign = 0  # by which the next start counts in that lead
        self.num_ready = 0
        self.num_parked = 0
        self.ready_tokens = 0

    def __len__(self) -> int:
        return self.num_ready + self.num_parked

    def __iter__(self) -> Iterator[Sequence]:
        for flow in self._flows.values():
            yield from flow.sequences

    @property
    def has_adapters(self) -> bool:
        """Whether a sequence with an adapter waits."""
        return bool(self._by_age)

    @property
    def oldest(self) -> Sequence | None:
        """The oldest of the sequences with an adapter."""
        return self._by_age[0][2].sequences[0] if self._by_age else None

    @property
    def oldest_ready_s(self) -> float:
        """When the oldest sequence that may start arrived; there is one."""
        return self._ready_by_age[0][0]

    def flow(self, priority: int, key: AdapterKey) -> Flow | None:
        return self._flows.get((priority, key))

    def ready_flows(self) -> Iterator[Flow]:
        return (flow for _since_s, _serial, flow in self._ready_by_age)

    def add(self, sequence: Sequence, is_parked: bool) -> Flow:
        request = sequence.request
        place = request.priority, request.key
        flow = self._flows.get(place)
        if flow is None:
            flow = self._flows[place] = Flow(self.name, *place, is_parked)
        else:
            self._unfile(flow)
        assert flow.is_parked == is_parked
        bisect.insort(flow.sequences, sequence, key=arrival_s)
        self._count(flow, [sequence], 1)
        self._file(flow)
        return flow

    def remove(self, sequence: Sequence) -> Flow:
        request = sequence.request
        flow = self._flows[request.priority, request.key]
        self._unfile(flow)
        place = bisect.bisect_left(flow.sequences, request.arrival_s, key=arrival_s)
        del flow.sequences[flow.sequences.index(sequence, place)]
        self._count(flow, [sequence], -1)
        if flow.sequences:
            self._file(flow)
        else:
            del self._flows[request.priority, request.key]
            if not flow.is_parked:
                self._leave_level(flow)
        return flow

    def move(self, flow: Flow, is_parked: bool) -> None:
        """Parks a flow, or makes it ready."""
        self._unfile(flow)
        self._count(flow, flow.sequences, -1)
        flow.is_parked = is_parked
        self._count(flow, flow.sequences, 1)
        if is_parked:
            self._leave_level(flow)
        self._file(flow)

    def first(self, aged_s: float) -> Sequence | None:
        """Returns the sequence to start next. Sequences that arrived at `aged_s` or before are
        aged."""
        if not self._ready_by_age:
            return None
        since_s, _serial, flow = self._ready_by_age[0]
        if since_s > aged_s:
            self._aged_lead = self._aged_sign = 0
        else:
            self._aged_sign = -1 if self._aged_lead > 0 else 1
        if self._aged_sign > 0:
            return flow.sequences[0]
        priority = self._priorities[-1]
        key = self._levels[priority].first()
        assert key is not None
        return self._flows[priority, key].sequences[0]

    def started(self, sequence: Sequence, num_tokens: int) -> None:
        """Charges the sequence that `first` returned, which starts."""
        self._aged_lead += self._aged_sign * num_tokens
        self.charge(sequence, num_tokens)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charges the sequence's adapter."""
        level = self._levels.get(sequence.request.priority)
        if level is not None:
            level.charge(sequence.request.key, num_tokens)

    def aged_keys(self, aged_s: float) -> Iterator[AdapterKey]:
        """Yields the keys of flows, parked or not, whose first is aged, in order of arrival."""
        for since_s, _serial, flow in self._by_age:
            if since_s > aged_s:
                return
            yield flow.key

    def young_keys(self, aged_s: float) -> Iterator[AdapterKey]:
        """Yields the keys of all other flows, by priority, then in order of arrival."""
        for _rank, since_s, _serial, flow in self._by_rank:
            if since_s > aged_s:
                yield flow.key

    def _count(self, flow: Flow, sequences: list[Sequence], sign: int) -> None:
        num_tokens = sign * sum(sequence.num_uncomputed for sequence in sequences)
        flow.num_tokens += num_tokens
        if flow.is_parked:
            self.num_parked += sign * len(sequences)
        else:
            self.num_ready += sign * len(sequences)
            self.ready_tokens += num_tokens

    def _unfile(self, flow: Flow) -> None:
        """Removes a flow from all orders, before its first sequence may change."""
        if flow.key:
            del self._by_age[bisect.bisect_left(self._by_age, flow.by_age)]
            del self._by_rank[bisect.bisect_left(self._by_rank, flow.by_rank)]
        if not flow.is_parked:
            del self._ready_by_age[bisect.bisect_left(self._ready_by_age, flow.by_age)]

    def _file(self, flow: Flow) -> None:
        flow.arrival_s = flow.sequences[0].request.arrival_s
        if flow.key:
            bisect.insort(self._by_age, flow.by_age)
            bisect.insort(self._by_rank, flow.by_rank)
        if flow.is_parked:
            return
        bisect.insort(self._ready_by_age, flow.by_age)
        if flow.priority not in self._levels:
            self._levels[flow.priority] = DeficitRoundRobin(self._quantum)
            bisect.insort(self._priorities, flow.priority)
        self._levels[flow.priority].enter(flow.key)

    def _leave_level(self, flow: Flow) -> None:
        level = self._levels[flow.priority]
        level.leave(flow.key)
        if not level:
            del self._levels[flow.priority]
            self._priorities.remove(flow.priority)

    def check_integrity(self) -> None:
        """Asserts that all orders agree with the flows."""
        flows = list(self._flows.values())
        ready = [flow for flow in flows if not flow.is_parked]
        with_adapter = [flow for flow in flows if flow.key]
        assert sorted(flow.by_age for flow in with_adapter) == self._by_age
        assert sorted(flow.by_rank for flow in with_adapter) == self._by_rank
        assert sorted(flow.by_age for flow in ready) == self._ready_by_age
        assert {(p, d) for p, d in self._flows} == {(f.priority, f.key) for f in flows}
        assert sorted({flow.priority for flow in ready}) == self._priorities == sorted(self._levels)
        for priority, level in self._levels.items():
            members = [flow.key for flow in ready if flow.priority == priority]
            assert len(level) == len(members)
            assert all(key in level for key in members)
        for flow in flows:
            assert flow.sequences == sorted(flow.sequences, key=arrival_s), "not in order"
            assert flow.sequences, "an empty flow"
            assert flow.num_tokens == sum(s.num_uncomputed for s in flow.sequences)
            assert flow.arrival_s == flow.sequences[0].request.arrival_s
        assert self.num_ready == sum(len(flow.sequences) for flow in ready)
        assert len(self) == sum(len(flow.sequences) for flow in flows)
        assert self.ready_tokens == sum(flow.num_tokens for flow in ready)
