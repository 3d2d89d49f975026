"""Places to run, and pages, as shares: which sequences give up theirs for a tenant that has less.

Turns in the queue alone do not suffice: started sequences may run for long, and so hold all places.
Of R places and k tenants that run or wait for one, each has a right to R // k, at least one, and to
as large a part of the pages. A tenant that has less, whose turn is near, and that has waited, gets
a place of the tenant that has most beyond its right; where there are more tenants than places, of
the tenant that has had its place for longest. A sequence that gives up its place is computed again
later, from the prefix cache if its pages are still there.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from inference_svc.core import Sequence
from inference_svc.engine.policy.fair_queue import FairQueue
from inference_svc.engine.policy.pages import PagePool
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
    """How many places there are, and how many of them and of the pages each tenant has a right
    to."""

    all_places: int
    places: int
    pages: int


@dataclass(slots=True)
class Claims:
    """`sequences` that are to start out of turn, once `victims` have given up their places; and the
    running sequences and the free places, then. `running` is in order of rank. `places` and `pages`
    count each tenant's, of all these sequences and of the running ones."""

    running: list[Sequence]
    num_free_pages: int
    sequences: list[Sequence] = field(default_factory=list)
    victims: list[Sequence] = field(default_factory=list)
    places: Counter[str] = field(init=False)
    pages: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.places = Counter(each.request.tenant for each in self.running)
        self.pages = pages_of(self.running)

    def is_full(self, rights: Rights) -> bool:
        return len(self.running) + len(self.sequences) >= rights.all_places

    def place_victim(self, tenant: str, rights: Rights) -> Sequence | None:
        """Returns which sequence gives up its place for a tenant."""
        victim = _last_of_most(self.places, rights.places, self.running, tenant)
        if victim is None and self.running and not self.places[tenant]:
            return _longest_turn(self.running)
        return victim

    def pages_victim(self, tenant: str, right: int) -> Sequence | None:
        """Returns which sequence gives up its pages for a tenant where others hold more than
        `right`: never the first in rank."""
        others = self.running[1:]
        names = {each.request.tenant for each in others}
        held = Counter({name: self.pages[name] for name in names})
        return _last_of_most(held, right, others, tenant)

    def take(self, victim: Sequence, num_released: int) -> int:
        """Takes a victim's place and pages, of which so many become free; returns its place in the
        order of rank."""
        index = self.running.index(victim)
        del self.running[index]
        self.victims.append(victim)
        self._count(victim, -1)
        self.num_free_pages += num_released
        return index

    def give_back(self, index: int, num_released: int) -> None:
        """Undoes the last `take`."""
        victim = self.victims.pop()
        self.running.insert(index, victim)
        self._count(victim, 1)
        self.num_free_pages -= num_released

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.places[sequence.request.tenant] += sign
        self.pages[sequence.request.tenant] += sign * len(sequence.page_ids)

    def add(self, sequence: Sequence, num_needed: int) -> None:
        self.sequences.append(sequence)
        self.places[sequence.request.tenant] += 1
        self.num_free_pages -= num_needed


@dataclass
class Places:
    """`max_sequences` places, and the pages. A tenant waits for `wait_s` before others give up
    theirs. `started` is called with each sequence that starts."""

    max_sequences: int
    pages: PagePool
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
        num_needed: Callable[[Sequence], int],
        now_s: float,
    ) -> Claims:
        """Returns the sequences to start out of turn, one of each tenant at most. `running` is in
        order of rank; `num_needed` returns how many free pages a sequence takes to start."""
        claims = Claims(list(running), self.pages.num_free)
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
            self.pages.num_pages // num_tenants,
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
            if not self._claim(claims, sequence, num_needed(sequence), rights, is_late):
                break
        return claims

    def _waits_since_s(self, tenant: TenantQueue) -> float:
        return max(tenant.oldest_ready_s, self.last_start_s(tenant.name))

    def _claim(
        self, claims: Claims, sequence: Sequence, num_needed: int, rights: Rights, is_late: bool
    ) -> bool:
        """Adds a claim for a sequence, unless there cannot be room for it. Returns False if there
        cannot be a place for any that comes after it. One `is_late` gets pages beyond its tenant's
        right, and of whoever has any."""
        tenant = sequence.request.tenant
        own_pages = claims.pages[tenant] + self.pages.pages_for(len(sequence.token_ids))
        if num_needed > claims.num_free_pages and own_pages > rights.pages and not is_late:
            return True  # it waits until others end, or until it is late
        pages_right = 0 if is_late else rights.pages
        taken: list[tuple[int, int]] = []
        while (is_full := claims.is_full(rights)) or num_needed > claims.num_free_pages:
            victim = (
                claims.place_victim(tenant, rights)
                if is_full
                else claims.pages_victim(tenant, pages_right)
            )
            if victim is None:
                for before in reversed(taken):
                    claims.give_back(*before)
                return not is_full
            num_released = self.pages.num_released(victim.page_ids)
            taken.append((claims.take(victim, num_released), num_released))
        claims.add(sequence, num_needed)
        return True


def pages_of(running: Iterable[Sequence]) -> Counter[str]:
    """Counts the pages of each tenant; shared pages count for each sequence."""
    pages: Counter[str] = Counter()
    for sequence in running:
        pages[sequence.request.tenant] += len(sequence.page_ids)
    return pages


def last_of_largest(running: SequenceOf[Sequence], needing: Sequence) -> Sequence:
    """Returns the sequence that gives up its pages for another sequence: the last in rank of the
    tenant that holds most; of equal ones its own. The first in rank, unless it runs alone, keeps
    its pages: so it comes to its end, and each of the others is the first one day."""
    pages = pages_of(running)
    others = running[1:] or running
    largest = max(
        (each.request.tenant for each in others),
        key=lambda name: (pages[name], name == needing.request.tenant),
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
