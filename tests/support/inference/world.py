"""Everything of an engine but tensors and threads: scheduler and residency are the real ones.

The puller is synchronous and never fails; a step is a second.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress

from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Shape
from inference_svc.adapters.memory.tiers import HostCopy, HostTier
from inference_svc.adapters.pulls.pull import PullDone, PullEvent, PullFailed, PullJob, PullOpened
from inference_svc.adapters.residency import build_residency
from inference_svc.core import (
    AdapterKey,
    Part,
    Request,
    SampledToken,
    SamplingParams,
    Sequence,
    SequenceState,
    Sum,
)
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.settle import Settler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States
from inference_svc.errors import AdapterNotFound, AdapterUnusable, NoRoom

KIB = 1024
SIZES = {"a": 2, "b": 3, "c": 5, "d": 8, "e": 4}
SUMS = [Sum((Part("a"), Part("b", 0.5))), Sum((Part("e"), Part("b")))]


def header(digest: str) -> ImageHeader:
    """An image of as many targets as its size in KiB."""
    segments = [
        Segment(target, kind, 4, target * KIB + offset, 512)
        for target in range(SIZES[digest])
        for kind, offset in ((SegmentKind.A, 0), (SegmentKind.B, 512))
    ]
    size = SIZES[digest] * KIB
    return ImageHeader(digest, digest, "layout", 1, size, tuple(segments))


class StepPuller:
    """Says PullOpened, then, once there is room, PullDone: one event each time it is asked.

    `begun` are the digests in the order in which their pulls began.
    """

    num_workers = 2
    others = None

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.jobs: deque[PullJob] = deque()
        self.posted: deque[PullEvent] = deque()

    def start(self, job: PullJob) -> None:
        if job.progress.header is None:
            self.begun.append(job.digest)
        self.jobs.append(job)

    def cancel(self, job: PullJob) -> None:
        if job.cancel():
            self.posted.append(PullFailed(job, None))

    def next_event(self) -> PullEvent | None:
        if self.posted:
            return self.posted.popleft()
        if not self.jobs:
            return None
        job = self.jobs.popleft()
        if job.is_cancelled:
            return PullFailed(job, None)
        if job.progress.header is None:
            job.progress.begin(header(job.digest))
            job._is_parked = True
            return PullOpened(job, header(job.digest))
        return PullDone(job)


class World:
    """An arena of 10 KiB and three rows, two places to run. Nothing here is wasted: every step
    checks that."""

    def __init__(self, host_kib: int, ageing_s: float = 2.0, num_pages: int = 64) -> None:
        self.puller = StepPuller()
        host = HostTier(host_kib * KIB) if host_kib else None
        if host is not None:
            host.step_copy_bytes = 4 * KIB  # so that some copies wait for another step
        slots = Slots(10 * KIB, 3, [Shape.of(header("d"))])
        memory = memoryview(bytearray(16 * KIB))
        self.now_s = 0.0
        self.residency = build_residency(
            slots,
            host,
            memory,
            self.puller,
            max_rank=64,
            stall_s=1e9,
            num_mixes=2,
            clock=lambda: self.now_s,
        )
        self.residency.loader.set_layout("layout")
        limits = Limits(2, 16, 16, 32, ageing_s)
        self.scheduler = Scheduler(limits, States(Pages(num_pages, 4)), self.residency)
        self.settler = Settler(self.scheduler, frozenset(), max_model_len=64)
        self.live: dict[str, Sequence] = {}
        self.loads: list[str] = []
        self.copying: list[str] = []
        self.num_made = 0

    def submit(self, key: AdapterKey, priority: int, num_tokens: int, tenant: str = "") -> Sequence:
        self.num_made += 1
        name = f"{self.num_made}"
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        arrival_s = self.now_s + self.num_made * 1e-6
        request = Request(
            name, (5, 6), sampling, key, priority=priority, arrival_s=arrival_s, tenant=tenant
        )
        sequence = self.live[name] = Sequence(request)
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def cancel(self, which: int, expired: bool = False) -> None:
        if self.live:
            name = sorted(self.live)[which % len(self.live)]
            self.settler.end(self.live.pop(name), self.now_s, expired=expired)

    def preempt(self) -> None:
        """The last in rank, as when pages are short."""
        if self.scheduler.running:
            self.scheduler.preempt(self.scheduler.running[-1], self.now_s)

    def load(self, digest: str) -> None:
        self.residency.add_waiter(digest, self.now_s)
        self.loads.append(digest)

    def step(self) -> None:
        self.now_s += 1.0
        event = self.puller.next_event()
        if event is not None:
            self.residency.loader.on_pull_event(event, self.now_s)
        assert not self.residency.loader.pop_failures()
        self.residency.loader.finish_copies(self.copying, self.now_s)
        self.copying = []
        queue = self.scheduler.queue
        self.residency.loader.advance(self.now_s, queue.turns.in_order(queue.aged_s(self.now_s)))
        num_preemptions = self.scheduler.num_preemptions
        batch = self.scheduler.schedule(self.now_s)
        if self.scheduler.num_preemptions == num_preemptions and not self.scheduler.is_short:
            is_full = self.scheduler.num_free == 0
            assert is_full or self.scheduler.queue.num_ready == 0, "a place is wasted"
        if batch is not None:
            copies = [change for change in batch.residency if isinstance(change, HostCopy)]
            self.copying = [copy.resident.digest for copy in copies]
            sampled = [SampledToken(7) for row in batch.rows if row.samples]
            self.settler.settle(batch, sampled, self.now_s)
        for name, sequence in list(self.live.items()):
            if sequence.state is SequenceState.FINISHED:
                del self.live[name]
        for digest in list(self.loads):
            if self.residency.is_resident(digest):
                self.loads.remove(digest)
                self.residency.remove_waiter(digest)
            else:
                self.residency.ensure_loading(digest, self.now_s)
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()
        waiting = Counter(s.request.key for s in self.scheduler.queue) + Counter(self.loads)
        running = Counter(s.request.key for s in self.scheduler.running)
        self.residency.check_integrity(waiting, running)

    def pin(self, digest: str) -> None:
        if self.residency.is_resident(digest):
            with suppress(NoRoom):
                self.residency.device.pin(digest)

    def unload(self, digest: str) -> None:
        with suppress(AdapterNotFound, AdapterUnusable):
            self.residency.unload(digest)
