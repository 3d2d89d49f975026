"""Admission: which requests are refused before they wait, and when to retry."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.core import Request
from inference_svc.engine.policy.fair_queue import GENERATED_WEIGHT
from inference_svc.engine.policy.scheduler import Scheduler
from inference_svc.engine.policy.tenant_queue import Flow, TenantQueue
from inference_svc.engine.policy.throughput import DepartureRate, Throughput
from inference_svc.errors import QueueFull

DEADLINE_SLACK = 2.0
"""A request is refused if it could not meet its deadline at this many times the measured
throughput."""
DEFAULT_RETRY_S = 1.0
"""The hint while no rate is known."""
MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0
MAX_LEDGER_ENTRIES = 1024


class RetryAfterLedger:
    """The last retry time given to each tenant, for ready and for parked requests apart: no two
    refused requests are sent to the same free place, and no tenant's attempts delay another's.

    The oldest entries are dropped once their time has passed, or beyond MAX_LEDGER_ENTRIES.
    """

    def __init__(self) -> None:
        self._moments: dict[tuple[str, bool], float] = {}

    def __len__(self) -> int:
        return len(self._moments)

    def next_s(self, tenant: str, is_parked: bool, interval_s: float, now_s: float) -> float:
        """Returns the seconds until the next place that is not taken, and takes it; the tenant gets
        one every `interval_s`."""
        key = tenant, is_parked
        begin_s = max(now_s, min(self._moments.pop(key, now_s), now_s + MAX_RETRY_S))
        self._moments[key] = begin_s + interval_s
        self._drop_old(now_s)
        return begin_s + interval_s - now_s

    def _drop_old(self, now_s: float) -> None:
        while self._moments:
            key, moment_s = next(iter(self._moments.items()))
            if moment_s > now_s and len(self._moments) <= MAX_LEDGER_ENTRIES:
                return
            del self._moments[key]


@dataclass
class Admission:
    """At most `max_queue` requests wait, and at most `max_tenant_queue` of one tenant, in addition
    to the ones that fill free places. Requests whose adapter is not resident are counted apart:
    they must not keep others out."""

    scheduler: Scheduler
    max_queue: int
    max_tenant_queue: int
    throughput: Throughput = field(default_factory=Throughput)
    _unpark_rate: DepartureRate = field(default_factory=DepartureRate)
    _retry_after: RetryAfterLedger = field(default_factory=RetryAfterLedger)

    def update_rates(self, now_s: float) -> None:
        """Samples, once per step, how many requests have left the parked part of the queue."""
        queue = self.scheduler.queue
        self._unpark_rate.observe(queue.num_left_parked, now_s, is_waiting=queue.num_parked > 0)

    def refusal(self, request: Request, now_s: float) -> QueueFull | None:
        """Returns why the request cannot wait, with an estimate of when to retry; None to admit."""
        queue, places = self.scheduler.queue, self.scheduler.num_free
        tenant = queue.tenant(request.tenant)
        is_parked = not self.scheduler.is_schedulable(request.key)
        if is_parked:
            num_waiting, num_own = queue.num_parked, tenant.num_parked if tenant else 0
        else:
            num_waiting, num_own = queue.num_ready, tenant.num_ready if tenant else 0
        # Requests whose prompt is computed by another one will be in the queue, too.
        num_waiting += self.scheduler.siblings.num_held
        num_own += self.scheduler.siblings.num_of(request.tenant)
        message = ""
        if num_waiting >= self.max_queue + places:
            message = f"{num_waiting} requests are waiting"
        elif num_own >= self.max_tenant_queue + places:
            message = f"{num_own} requests of tenant {request.tenant!r} are waiting"
        if not message:
            return self._late_refusal(request, now_s)
        hint_s = self._next_place_s(request.tenant, is_parked, not num_own, now_s)
        return QueueFull(message, retry_after_s=_bounded(hint_s))

    def _next_place_s(self, tenant: str, is_parked: bool, is_new: bool, now_s: float) -> float:
        """A place becomes free each time a request ends or, for a parked request, another is
        unparked. Tenants share them equally; `is_new`: this tenant has none waiting yet."""
        queue = self.scheduler.queue
        if is_parked:
            per_s, num_sharing = self._unpark_rate.per_s, queue.num_parked_tenants
        else:
            per_s = self.throughput.requests_per_s if self.throughput.is_known else None
            num_sharing = queue.num_ready_tenants
        if per_s is None:
            return DEFAULT_RETRY_S
        interval_s = MAX_RETRY_S if per_s == 0 else min(MAX_RETRY_S, (num_sharing + is_new) / per_s)
        return self._retry_after.next_s(tenant, is_parked, interval_s, now_s)

    def _late_refusal(self, request: Request, now_s: float) -> QueueFull | None:
        """Returns a refusal if the deadline will pass in the queue. Counts only requests that are
        certainly served before: ready requests of the same tenant."""
        tenant = self.scheduler.queue.tenant(request.tenant)
        if request.deadline_s is None or tenant is None or not self.throughput.is_known:
            return None
        left_s = request.deadline_s - now_s
        max_tokens_in_time = DEADLINE_SLACK * left_s * self.throughput.tokens_per_s
        num_tokens = self._work(tenant.ready_tokens, tenant.num_ready)
        if num_tokens > max_tokens_in_time:  # else there is no need to count exactly
            num_tokens = min(num_tokens, self._work_before(request, tenant, now_s))
        if num_tokens <= max_tokens_in_time:
            return None
        wait_s = num_tokens / self.throughput.tokens_per_s
        return QueueFull(
            f"the wait of about {wait_s:.1f} s exceeds the rest of the deadline, {left_s:.1f} s",
            retry_after_s=_bounded(wait_s - left_s),
        )

    def _work_before(self, request: Request, tenant: TenantQueue, now_s: float) -> float:
        """Follows the order of `TenantQueue`: all of the request's own adapter and of higher
        priorities, and of each other adapter as much as its own gets, or one quantum if none of its
        own waits, since it then joins the next round; while there are aged ones, as much again of
        those."""
        own = tenant.flow(request.priority, request.key)
        by_rounds = own_work = self._work_of(own) if own else 0.0
        # A quantum of generated tokens only has the fewest tokens.
        share_each = own_work if own else self.scheduler.limits.fair_quantum / GENERATED_WEIGHT
        aged_s, aged = self.scheduler.queue.aged_s(now_s), 0.0
        for flow in tenant.ready_flows():
            if flow is own:
                continue
            work = in_round = self._work_of(flow)
            if flow.priority < request.priority:
                in_round = 0.0
            elif flow.priority == request.priority:
                in_round = min(work, share_each)
            by_rounds += in_round
            if flow.arrival_s <= aged_s:
                aged += work - in_round
        return by_rounds + min(aged, by_rounds)

    def _work_of(self, flow: Flow) -> float:
        return self._work(flow.num_tokens, len(flow.sequences))

    def _work(self, num_known: int, num_requests: int) -> float:
        """Returns tokens as Throughput counts them: computed and generated ones."""
        generated = num_requests * self.throughput.generated_per_request
        return num_known * self.scheduler.prefix_miss_ratio.value + generated


def _bounded(seconds: float) -> float:
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)
