"""Places to run, and room, as shares: which sequences give up theirs for a tenant that has less.

Turns in the queue alone do not suffice: started sequences may run for long, and so hold all places.
Of R places and k tenants that run or wait for one, each has a right to R // k, at least one, and to
as large a part of the room for state. A tenant that has less, whose turn is near, and that has
waited, gets a place of the tenant that has most beyond its right; where there are more tenants than
places, of the tenant that has had its place for longest. A sequence that gives up its place is
computed again later, from the prefix cache if its state is still there.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from inference_svc.core import Sequence
from inference_svc.engine.policy.fair_queue import FairQueue
from inference_svc.engine.policy.states.states import States
from inference_svc.engine.policy.tenant_queue import TenantQueue

WAIT_S = 0.25
"""How long a tenant waits for a place before others give up theirs: most end by themselves, and
each tenant makes others give up one at a time."""
LATE = 4
"""A tenant that has nothing and has waited for so many times as long is late: until the first of
them has started, nobody else does so out of turn."""
TURN_TOKENS = 256
"""The tokens that a tenant generates, at least, in a place that all tenants take turns in."""


MAX_REMEMBERED = 4096
"""Tenants of which is known when they last got a place."""
SCAN_S = 0.05
"""How often is looked for tenants that wait: there may be thousands."""


class Rights(NamedTuple):
    """How many places there are, and how many of them, and how much room in tokens, each tenant
    has a right to."""

    all_places: int
    places: int
    room: int


@dataclass(slots=True)
class Claims:
    """`sequences` that are to start out of turn, once `victims` have given up their places; and the
    running sequences and the free places, then. `running` is in order of rank. `places` and `room`
    count each tenant's, of all these sequences and of the running ones."""

    running: list[Sequence]
    free_room: int
    sequences: list[Sequence] = field(default_factory=list)
    victims: list[Sequence] = field(default_factory=list)
    places: Counter[str] = field(init=False)
    room: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.places = Counter(each.request.tenant for each in self.running)
        self.room = room_of(self.running)

    def is_full(self, rights: Rights) -> bool:
        return len(self.running) + len(self.sequences) >= rights.all_places

    def place_victim(self, tenant: str, rights: Rights) -> Sequence | None:
        """Returns which sequence gives up its place for a tenant."""
        victim = _last_of_most(self.places, rights.places, self.running, tenant)
        if victim is None and self.running and not self.places[tenant]:
            return _longest_turn(self.running)
        return victim

    def room_victim(self, tenant: str, right: int) -> Sequence | None:
        """Returns which sequence gives up its room for a tenant where others hold more than
        `right`: never the first in rank."""
        others = self.running[1:]
        names = {each.request.tenant for each in others}
        held = Counter({name: self.room[name] for name in names})
        return _last_of_most(held, right, others, tenant)

    def take(self, victim: Sequence, released_room: int) -> int:
        """Takes a victim's place and room, of which so much becomes free; returns its place in the
        order of rank."""
        index = self.running.index(victim)
        del self.running[index]
        self.victims.append(victim)
        self._count(victim, -1)
        self.free_room += released_room
        return index

    def give_back(self, index: int, released_room: int) -> None:
        """Undoes the last `take`."""
        victim = self.victims.pop()
        self.running.insert(index, victim)
        self._count(victim, 1)
        self.free_room -= released_room

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.places[sequence.request.tenant] += sign
        self.room[sequence.request.tenant] += sign * sequence.room

    def add(self, sequence: Sequence, needed_room: int) -> None:
        self.sequences.append(sequence)
        self.places[sequence.request.tenant] += 1
        self.free_room -= needed_room


@dataclass
class Places:
    """`max_sequences` places, and the room. A tenant waits for `wait_s` before others give up
    theirs. `started` is called with each sequence that starts."""

    max_sequences: int
    states: States
    wait_s: float = WAIT_S
    _started_s: dict[str, float] = field(default_factory=dict)  # by tenant, the last at the end
    _scan_s: float = -math.inf

    def started(self, sequence: Sequence, now_s: float) -> None:
        tenant = sequence.request.tenant
        self._started_s.pop(tenant, None)
        self._started_s[tenant] = now_s
        if len(self._started_s) > MAX_REMEMBERED:
            del self._started_s[next(iter(self._started_s))]

    def last_start_s(self, tenant: str) -> float:
        """Returns when a tenant last got a place; -inf if that is not known."""
        return self._started_s.get(tenant, -math.inf)

    def claims(
        self,
        running: SequenceOf[Sequence],
        queue: FairQueue,
        now_s: float,
    ) -> Claims:
        """Returns the sequences to start out of turn, one of each tenant at most. `running` is in
        order of rank."""
        claims = Claims(list(running), self.states.free_room)
        if now_s < self._scan_s:
            return claims
        self._scan_s = now_s + SCAN_S
        held, tenants = claims.places, {each.name: each for each in queue.ready_tenants()}
        num_tenants = len({name for name in held if held[name]} | tenants.keys())
        if num_tenants == 1:
            return claims
        rights = Rights(
            self.max_sequences,
            max(1, self.max_sequences // num_tenants),
            self.states.room // num_tenants,
        )
        due = [
            (held[name], since_s, name)
            for name, tenant in tenants.items()
            if now_s - (since_s := self._waits_since_s(tenant)) >= self.wait_s
            and held[name] < rights.places
            # Who has a place waits for its turn, too.
            and (not held[name] or queue.is_near(tenant))
        ]
        # The first one has nothing, if any has, and of those has waited longest.
        due = heapq.nsmallest(self.max_sequences, due)
        is_late = bool(due) and not due[0][0] and now_s - due[0][1] >= LATE * self.wait_s
        for *_, name in due[:1] if is_late else due:
            sequence = tenants[name].first(queue.aged_s(now_s))
            assert sequence is not None, "the tenant has a ready one"
            if not self._claim(claims, sequence, rights, is_late):
                break
        return claims

    def _waits_since_s(self, tenant: TenantQueue) -> float:
        return max(tenant.oldest_ready_s, self.last_start_s(tenant.name))

    def _claim(self, claims: Claims, sequence: Sequence, rights: Rights, is_late: bool) -> bool:
        """Adds a claim for a sequence, unless there cannot be room for it. Returns False if there
        cannot be a place for any that comes after it. One `is_late` gets room beyond its tenant's
        right, and of whoever has any."""
        tenant, needed_room = sequence.request.tenant, self.states.needed_room(sequence)
        own_room = claims.room[tenant] + self.states.room_for(len(sequence.token_ids))
        if needed_room > claims.free_room and own_room > rights.room and not is_late:
            return True  # it waits until others end, or until it is late
        room_right = 0 if is_late else rights.room
        taken: list[tuple[int, int]] = []
        while (is_full := claims.is_full(rights)) or needed_room > claims.free_room:
            victim = (
                claims.place_victim(tenant, rights)
                if is_full
                else claims.room_victim(tenant, room_right)
            )
            if victim is None:
                for before in reversed(taken):
                    claims.give_back(*before)
                return not is_full
            released_room = self.states.released_room(victim)
            taken.append((claims.take(victim, released_room), released_room))
        claims.add(sequence, needed_room)
        return True


def room_of(running: Iterable[Sequence]) -> Counter[str]:
    """Counts the room that each tenant has; shared parts count for each sequence."""
    room: Counter[str] = Counter()
    for sequence in running:
        room[sequence.request.tenant] += sequence.room
    return room


def last_of_largest(running: SequenceOf[Sequence], needing: Sequence) -> Sequence:
    """Returns the sequence that gives up its room for another sequence: the last in rank of the
    tenant that holds most; of equal ones its own. The first in rank, unless it runs alone, keeps
    its room: so it comes to its end, and each of the others is the first one day."""
    room = room_of(running)
    others = running[1:] or running
    largest = max(
        (each.request.tenant for each in others),
        key=lambda name: (room[name], name == needing.request.tenant),
    )
    return next(each for each in reversed(others) if each.request.tenant == largest)


def _last_of_most(
    held: Counter[str], right: int, running: SequenceOf[Sequence], but: str
) -> Sequence | None:
    """Returns the last in rank of the other tenant that holds most, if that is beyond its right."""
    most = max((name for name in held if name != but), key=held.__getitem__, default=but)
    if most == but or held[most] <= right:
        return None
    own = (each for each in reversed(running) if each.request.tenant == most)
    return next(own, None)


def _longest_turn(running: SequenceOf[Sequence]) -> Sequence | None:
    """Returns the sequence that has generated most in its place, if that is a turn."""
    longest = max(running, key=lambda each: each.num_output - each.num_output_at_start)
    generated = longest.num_output - longest.num_output_at_start
    return longest if generated >= TURN_TOKENS else None
