"""Each rank's part of an adapter, pulled together: rank 0's pull is done when all ranks' are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contract.images.header import ImageHeader
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.stages import extents_of, joined, parts_of
from inference_svc.adapters.pulls.pace import PullPace
from inference_svc.adapters.pulls.pull import PullDone, PullFailed, PullJob
from inference_svc.adapters.pulls.threads import Cancelled
from inference_svc.engine.ranks.group import RankGroup
from inference_svc.engine.ranks.messages import CancelPull, Opened, OpenPull, Pull, PullEnded
from inference_svc.errors import TRY_LATER
from servicekit.errors import Internal, ServiceError, Unavailable

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How soon a pull that is cancelled, or an engine that ends, is noticed."""


@dataclass
class _Running:
    """A pull of the other ranks: the ranks that may still write, and the first error. `opened` are
    the headers of stages' parts, by stage, and `header` is of all."""

    number: int
    left: set[int]
    error: ServiceError | None = None
    opened: dict[int, ImageHeader] = field(default_factory=dict)
    header: ImageHeader | None = None
    has_begun: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


class RankPulls:
    """The pulls of the other ranks; see `adapters.pulls.threads.OtherRanks`. Ranks are in stages,
    equally many in each, with arenas of `arena_bytes`.

    Images of the ranks of a stage lie alike, and those of stages do not: the first rank of each
    stage opens its pull, and says how large its part is, before the engine decides where all parts
    are to be.

    They keep a pace when rank 0's do, which is this one.
    """

    def __init__(
        self,
        group: RankGroup,
        land: Callable[[Sequence[Extent]], None],
        pace: PullPace | None = None,
        num_stages: int = 1,
        arena_bytes: int = 0,
    ) -> None:
        """`land` is of rank 0; see `RankBackend.land`."""
        self._group, self._land, self._arena_bytes = group, land, arena_bytes
        self._num_ranks = (len(group.others) + 1) // num_stages
        self._firsts = [each for each in group.others if each.rank.index % self._num_ranks == 0]
        self._lock = threading.Lock()
        self._layout_ids: tuple[str, ...] = ()
        self._by_job: dict[PullJob, _Running] = {}
        self._by_number: dict[int, _Running] = {}
        self._last_number = 0
        group.on_pull_opened = self._on_opened
        group.on_pull_ended = self._on_ended
        if pace is not None:
            group.needs_pace = lambda: pace.is_needed()

    def set_layouts(self, layout_ids: tuple[str, ...]) -> None:
        """Notes the ids of the other ranks' layouts, by rank."""
        assert len(layout_ids) == len(self._group.others)
        self._layout_ids = layout_ids

    def open(self, job: PullJob, header: ImageHeader) -> ImageHeader:
        if not self._firsts:
            self._end(job)
            return header
        running = self._new(job, {each.rank.index for each in self._firsts})
        for each in self._firsts:
            layout_id = self._layout_ids[each.rank.index - 1]
            each.send(OpenPull(running.number, job.digest, layout_id))
        count = len(self._firsts)
        self._wait(running, job, lambda: len(running.opened) == count)
        if job.is_cancelled:
            raise Cancelled
        if running.error is not None:
            raise running.error
        if len(running.opened) < count:
            raise Cancelled  # ranks are being closed
        parts = (running.opened[stage + 1] for stage in range(count))
        running.header = joined((header, *parts))
        return running.header

    def begin(self, job: PullJob, header: ImageHeader, extents: tuple[Extent, ...]) -> None:
        """Has all ranks pull their parts of a job's adapter, those of a stage to the same
        extents."""
        others = self._group.others
        running = self._by_job.get(job)
        if running is None or running.has_begun or not self._firsts:
            running = self._new(job, set())
            running.header = header
        assert running.header is not None, "it is open"
        opened = {stage * self._num_ranks for stage in running.opened}
        with running.changed:
            running.has_begun = True
            running.left |= {each.rank.index for each in others} - opened
        parts = parts_of(running.header)
        for each, layout_id in zip(others, self._layout_ids, strict=True):
            stage = each.rank.index // self._num_ranks
            own = extents_of(running.header, extents, stage, self._arena_bytes)
            segments = parts[stage].segments
            is_open = each.rank.index in opened
            each.send(Pull(running.number, job.digest, layout_id, segments, own, is_open))

    def _new(self, job: PullJob, ranks: set[int]) -> _Running:
        """Ends earlier pulls of a job, and returns a new one of these ranks."""
        self._end(job)
        with self._lock:
            self._last_number += 1
            running = _Running(self._last_number, ranks)
            self._by_job[job] = self._by_number[self._last_number] = running
        return running

    def finish(
        self, job: PullJob, event: PullDone | PullFailed | None
    ) -> PullDone | PullFailed | None:
        """Returns the end of a job on all ranks, of which `event` is rank 0's. Pulls of a parked
        job stay open."""
        # A job that is parked may go on already, in another thread.
        running = None if event is None else self._by_job.get(job)
        if running is None:
            return event
        if isinstance(event, PullDone):
            assert job.progress.sink is not None
            assert running.header is not None
            placed = job.progress.sink.extents
            own = extents_of(running.header, placed, 0, self._arena_bytes)
            event = landed(event, own, self._land)
        if isinstance(event, PullDone):
            self._wait(running, job, lambda: not running.left)
        is_done = isinstance(event, PullDone) and not running.left and running.error is None
        self._end(job)
        if is_done or not isinstance(event, PullDone):
            return event
        return PullFailed(job, None if job.is_cancelled else running.error)

    def abandon(self, job: PullJob) -> None:
        """Ends the open pulls of a parked job, which write nothing, without waiting."""
        with self._lock:
            running = self._by_job.pop(job, None)
            if running is not None:
                del self._by_number[running.number]
        if running is not None:
            for each in self._firsts:
                each.send(CancelPull(running.number))

    def _wait(self, running: _Running, job: PullJob, is_done: Callable[[], bool]) -> None:
        """Waits until it is done, one has failed, or the job is cancelled."""
        with running.changed:
            while not is_done() and running.error is None and not job.is_cancelled:
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

    def _on_opened(self, index: int, opened: Opened) -> None:
        with self._lock:
            running = self._by_number.get(opened.number)
        if running is None:
            return
        with running.changed:
            running.opened[index // self._num_ranks] = opened.header
            running.changed.notify_all()

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
