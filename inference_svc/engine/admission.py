"""Who is refused before it waits, and when it may come back."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.core import Request
from inference_svc.engine.pace import Pace
from inference_svc.engine.scheduler import Scheduler
from inference_svc.errors import QueueFull

HOPELESS = 2.0
"""A deadline is hopeless if it could not be met at this many times the measured pace."""
UNKNOWN_S = 1.0
"""The hint while nothing has been measured."""
SHORTEST_S, LONGEST_S = 0.05, 60.0


@dataclass
class Admission:
    """At most `max_queue` requests wait, of one tenant at most `max_tenant_queue`, beside those
    that fill the places that are free. Those whose adapter is not there count apart: they must
    not keep others out."""

    scheduler: Scheduler
    max_queue: int
    max_tenant_queue: int
    pace: Pace = field(default_factory=Pace)
    _promised_s: float = 0.0

    def refusal(self, request: Request, now_s: float) -> QueueFull | None:
        """Why the request cannot wait, with an honest hint when to come back."""
        queue, places = self.scheduler.queue, self.scheduler.num_places
        tenant = queue.tenant(request.tenant)
        if self.scheduler.may_start(request.digest):
            num_waiting, num_own = queue.num_ready, tenant.num_ready if tenant else 0
        else:
            num_waiting, num_own = queue.num_parked, tenant.num_parked if tenant else 0
        if num_waiting >= self.max_queue + places:
            return self._full(f"{num_waiting} requests are waiting", 1, now_s)
        if num_own >= self.max_tenant_queue + places:
            message = f"{num_own} requests of tenant {request.tenant!r} are waiting"
            return self._full(message, queue.num_tenants, now_s)
        return self._hopeless(request, now_s)

    def _full(self, message: str, num_sharing: int, now_s: float) -> QueueFull:
        """A place is free each time that a request ends, and one that is free is promised once:
        who is refused later is told to come later."""
        if not self.pace.is_known:
            return QueueFull(message, retry_after_s=UNKNOWN_S)
        first_s = max(now_s, min(self._promised_s, now_s + LONGEST_S))
        self._promised_s = first_s + num_sharing / self.pace.requests_per_s
        return QueueFull(message, retry_after_s=_bounded(self._promised_s - now_s))

    def _hopeless(self, request: Request, now_s: float) -> QueueFull | None:
        """For a deadline that will pass in the queue: only what is surely served before counts,
        the requests of its own tenant that are ready, if none is of a lower priority."""
        tenant = self.scheduler.queue.tenant(request.tenant)
        if request.deadline_s is None or tenant is None or not self.pace.is_known:
            return None
        lowest = tenant.lowest_priority
        if lowest is None or request.priority > lowest:
            return None
        num_tokens = tenant.ready_tokens + tenant.num_ready * self.pace.generated_per_request
        wait_s = num_tokens / self.pace.tokens_per_s
        left_s = request.deadline_s - now_s
        if wait_s <= HOPELESS * left_s:
            return None
        return QueueFull(
            f"the wait of about {wait_s:.1f} s exceeds what the deadline leaves, {left_s:.1f} s",
            retry_after_s=_bounded(wait_s - left_s),
        )


def _bounded(seconds: float) -> float:
    return min(max(seconds, SHORTEST_S), LONGEST_S)
