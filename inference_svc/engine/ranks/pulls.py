"""Each rank's part of an adapter, pulled together: rank 0's pull is done when all ranks' are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contract.images.header import ImageHeader
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.pulls.pace import PullPace
from inference_svc.adapters.pulls.pull import PullDone, PullFailed, PullJob
from inference_svc.engine.ranks.group import RankGroup
from inference_svc.engine.ranks.messages import CancelPull, Pull, PullEnded
from inference_svc.errors import TRY_LATER
from servicekit.errors import Internal, ServiceError, Unavailable

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How soon a pull that is cancelled, or an engine that ends, is noticed."""


@dataclass
class _Running:
    """A pull of the other ranks: the ranks that may still write, and the first error."""

    number: int
    left: set[int]
    error: ServiceError | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)


class RankPulls:
    """The pulls of the other ranks; see `adapters.pulls.threads.OtherRanks`. They keep a pace when
    rank 0's do, which is this one."""

    def __init__(
        self,
        group: RankGroup,
        land: Callable[[Sequence[Extent]], None],
        pace: PullPace | None = None,
    ) -> None:
        """`land` is of rank 0; see `RankBackend.land`."""
        self._group, self._land = group, land
        self._lock = threading.Lock()
        self._layout_ids: tuple[str, ...] = ()
        self._by_job: dict[PullJob, _Running] = {}
        self._by_number: dict[int, _Running] = {}
        self._last_number = 0
        group.on_pull_ended = self._on_ended
        if pace is not None:
            group.needs_pace = lambda: pace.is_needed()

    def set_layouts(self, layout_ids: tuple[str, ...]) -> None:
        """Notes the ids of the other ranks' layouts, by rank."""
        assert len(layout_ids) == len(self._group.others)
        self._layout_ids = layout_ids

    def begin(self, job: PullJob, header: ImageHeader, extents: tuple[Extent, ...]) -> None:
        """Has all ranks pull their parts of a job's adapter, to the same extents."""
        self._end(job)
        with self._lock:
            self._last_number += 1
            number = self._last_number
            running = _Running(number, {each.rank.index for each in self._group.others})
            self._by_job[job] = self._by_number[number] = running
        for each, layout_id in zip(self._group.others, self._layout_ids, strict=True):
            each.send(Pull(number, job.digest, layout_id, header.segments, extents))

    def finish(
        self, job: PullJob, event: PullDone | PullFailed | None
    ) -> PullDone | PullFailed | None:
        """Returns the end of a job on all ranks, of which `event` is rank 0's."""
        running = self._by_job.get(job)
        if running is None:
            return event
        if isinstance(event, PullDone):
            assert job.progress.sink is not None
            event = landed(event, job.progress.sink.extents, self._land)
        if isinstance(event, PullDone):
            self._wait(running, job)
        is_done = isinstance(event, PullDone) and not running.left and running.error is None
        self._end(job)
        if is_done or not isinstance(event, PullDone):
            return event
        return PullFailed(job, None if job.is_cancelled else running.error)

    def _wait(self, running: _Running, job: PullJob) -> None:
        """Waits until all ranks have ended, one has failed, or the job is cancelled."""
        with running.changed:
            while running.left and running.error is None and not job.is_cancelled:
                if self._group.is_ended:
                    running.error = self._group.failure
                    return
                running.changed.wait(POLL_S)

    def _end(self, job: PullJob) -> None:
        """Ends what is left of a job's pulls; returns when no rank writes any more."""
        with self._lock:
            running = self._by_job.pop(job, None)
        if running is None:
            return
        if running.left:
            for each in self._group.others:
                each.send(CancelPull(running.number))
        with running.changed:
            while running.left and not self._group.is_ended:
                running.changed.wait(POLL_S)
        with self._lock:
            del self._by_number[running.number]

    def _on_ended(self, index: int, ended: PullEnded) -> None:
        with self._lock:
            running = self._by_number.get(ended.number)
        if running is None:
            return
        with running.changed:
            running.left.discard(index)
            running.error = running.error or ended.error
            if not ended.is_done:
                running.error = running.error or _incomplete(index)
            running.changed.notify_all()


def landed(
    event: PullDone, extents: Sequence[Extent], land: Callable[[Sequence[Extent]], None]
) -> PullDone | PullFailed:
    """Brings a pulled image to the arena; returns the pull's end."""
    try:
        land(extents)
    except Exception:
        digest = event.job.digest
        logger.exception("an adapter cannot be copied to the device", extra={"digest": digest})
        return PullFailed(event.job, Internal(f"loading adapter {digest} failed"))
    return event


def _incomplete(index: int) -> ServiceError:
    return Unavailable(f"rank {index} ended its pull of the adapter before the end; {TRY_LATER}")
