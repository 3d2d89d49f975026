"""Who is refused before it waits, and when it may come back."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.core import Request
from inference_svc.engine.fair_queue import GENERATED_WEIGHT
from inference_svc.engine.scheduler import Scheduler
from inference_svc.engine.tenant_queue import Flow, TenantQueue
from inference_svc.engine.throughput import Departures, Pace
from inference_svc.errors import QueueFull

HOPELESS = 2.0
"""A deadline is hopeless if it could not be met at this many times the measured pace."""
UNKNOWN_S = 1.0
"""The hint while nothing has been measured."""
SHORTEST_S, LONGEST_S = 0.05, 60.0
MAX_PROMISES = 1024


class Promises:
    """What those who were refused have been told, by tenant and whether they wait for an adapter:
    a place that will be free is promised once, and nobody's tries put off anybody else.

    Those refused longest ago are forgotten once their moment is over, or beyond `MAX_PROMISES`.
    """

    def __init__(self) -> None:
        self._moments: dict[tuple[str, bool], float] = {}

    def __len__(self) -> int:
        return len(self._moments)

    def next_s(self, tenant: str, is_parked: bool, interval_s: float, now_s: float) -> float:
        """How long until the next place that has not been promised, if the tenant gets one every
        `interval_s`."""
        key = tenant, is_parked
        begin_s = max(now_s, min(self._moments.pop(key, now_s), now_s + LONGEST_S))
        self._moments[key] = begin_s + interval_s
        self._forget(now_s)
        return begin_s + interval_s - now_s

    def _forget(self, now_s: float) -> None:
        while self._moments:
            key, moment_s = next(iter(self._moments.items()))
            if moment_s > now_s and len(self._moments) <= MAX_PROMISES:
                return
            del self._moments[key]


@dataclass
class Admission:
    """At most `max_queue` requests wait, of one tenant at most `max_tenant_queue`, beside those
    that fill the places that are free. Those whose adapter is not there count apart: they must
    not keep others out."""

    scheduler: Scheduler
    max_queue: int
    max_tenant_queue: int
    pace: Pace = field(default_factory=Pace)
    _unparked: Departures = field(default_factory=Departures)
    _promises: Promises = field(default_factory=Promises)

    def look(self, now_s: float) -> None:
        """Once per turn: how fast the places of those free that wait for adapters."""
        queue = self.scheduler.queue
        self._unparked.note(queue.num_left_parked, now_s, is_waiting=queue.num_parked > 0)

    def refusal(self, request: Request, now_s: float) -> QueueFull | None:
        """Why the request cannot wait, with an honest hint when to come back."""
        queue, places = self.scheduler.queue, self.scheduler.num_places
        tenant = queue.tenant(request.tenant)
        is_parked = not self.scheduler.is_schedulable(request.digest)
        if is_parked:
            num_waiting, num_own = queue.num_parked, tenant.num_parked if tenant else 0
        else:
            num_waiting, num_own = queue.num_ready, tenant.num_ready if tenant else 0
        message = ""
        if num_waiting >= self.max_queue + places:
            message = f"{num_waiting} requests are waiting"
        elif num_own >= self.max_tenant_queue + places:
            message = f"{num_own} requests of tenant {request.tenant!r} are waiting"
        if not message:
            return self._hopeless(request, now_s)
        hint_s = self._next_place_s(request.tenant, is_parked, not num_own, now_s)
        return QueueFull(message, retry_after_s=_bounded(hint_s))

    def _next_place_s(self, tenant: str, is_parked: bool, is_new: bool, now_s: float) -> float:
        """A place is free each time that a request ends, or for one that waits for an adapter,
        that another does no more. Tenants share them, with this one if it `is_new` among them."""
        queue = self.scheduler.queue
        if is_parked:
            per_s, num_sharing = self._unparked.per_s, queue.num_parked_tenants
        else:
            per_s = self.pace.requests_per_s if self.pace.is_known else None
            num_sharing = queue.num_ready_tenants
        if per_s is None:
            return UNKNOWN_S
        interval_s = LONGEST_S if per_s == 0 else min(LONGEST_S, (num_sharing + is_new) / per_s)
        return self._promises.next_s(tenant, is_parked, interval_s, now_s)

    def _hopeless(self, request: Request, now_s: float) -> QueueFull | None:
        """For a deadline that will pass in the queue: only what is surely served before counts,
        of its own tenant and ready."""
        tenant = self.scheduler.queue.tenant(request.tenant)
        if request.deadline_s is None or tenant is None or not self.pace.is_known:
            return None
        left_s = request.deadline_s - now_s
        num_hopeless = HOPELESS * left_s * self.pace.tokens_per_s
        num_tokens = self._work(tenant.ready_tokens, tenant.num_ready)
        if num_tokens > num_hopeless:  # else there is no need to look closer
            num_tokens = min(num_tokens, self._work_before(request, tenant, now_s))
        if num_tokens <= num_hopeless:
            return None
        wait_s = num_tokens / self.pace.tokens_per_s
        return QueueFull(
            f"the wait of about {wait_s:.1f} s exceeds what the deadline leaves, {left_s:.1f} s",
            retry_after_s=_bounded(wait_s - left_s),
        )

    def _work_before(self, request: Request, tenant: TenantQueue, now_s: float) -> float:
        """As `TenantQueue` chooses: all of its own adapter and of higher priorities, and of each
        other adapter as much as its own gets, or one turn if nothing of its own waits, for then it
        joins the next round; while there are aged ones, as much again of them."""
        own = tenant.flow(request.priority, request.digest)
        by_turns = own_work = self._work_of(own) if own else 0.0
        # A turn that is all generated has the fewest tokens.
        turns_each = own_work if own else self.scheduler.limits.fair_quantum / GENERATED_WEIGHT
        aged_s, aged = self.scheduler.queue.aged_s(now_s), 0.0
        for flow in tenant.ready_flows():
            if flow is own:
                continue
            work = in_turn = self._work_of(flow)
            if flow.priority < request.priority:
                in_turn = 0.0
            elif flow.priority == request.priority:
                in_turn = min(work, turns_each)
            by_turns += in_turn
            if flow.arrival_s <= aged_s:
                aged += work - in_turn
        return by_turns + min(aged, by_turns)

    def _work_of(self, flow: Flow) -> float:
        return self._work(flow.num_tokens, len(flow.sequences))

    def _work(self, num_known: int, num_requests: int) -> float:
        """In tokens, as the pace counts them: what is computed and what is generated."""
        generated = num_requests * self.pace.generated_per_request
        return num_known * self.scheduler.computed_share.value + generated


def _bounded(seconds: float) -> float:
    return min(max(seconds, SHORTEST_S), LONGEST_S)
