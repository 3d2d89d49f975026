"""The main program of the other ranks: computes rank 0's steps, and pulls parts of adapters.

Its main thread takes steps, another one messages. It ends when rank 0 closes its sockets, or has
ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import DivideMagnitudes, ResidencyChange, TableWrite
from inference_svc.adapters.picture_targets import with_unread
from inference_svc.adapters.pulls.headers import HeaderReader
from inference_svc.adapters.pulls.pull import (
    ImageSink,
    PullDone,
    PullEvent,
    PullFailed,
    PullJob,
    PullOpened,
)
from inference_svc.adapters.pulls.threads import Puller
from inference_svc.adapters.targets import layout_of
from inference_svc.backends.base import RankBackend, RankFactory
from inference_svc.backends.exchange import ExchangeFailed, StepAbandoned
from inference_svc.backends.select import select_backend
from inference_svc.engine.build import (
    config_of_rank,
    describe,
    place_threads,
    pull_pace,
    set_num_threads,
    share_of,
)
from inference_svc.engine.control.status_types import RankStatus
from inference_svc.engine.memory_budget import check_device_budget
from inference_svc.engine.ranks.liveness import progress
from inference_svc.engine.ranks.messages import (
    ABANDON,
    DIVIDE,
    FREE_ALL,
    IDLE,
    RESTORE,
    STEP,
    TRACE,
    Built,
    CancelPull,
    Described,
    LostContact,
    NotBuilt,
    Opened,
    OpenPull,
    Ping,
    Pong,
    Pull,
    PullEnded,
    Stacks,
    Start,
    StepFailed,
    StoreUpdate,
    TellStacks,
)
from inference_svc.engine.ranks.pulls import landed
from inference_svc.engine.ranks.report import Report
from inference_svc.engine.ranks.steps import (
    Change,
    SlotDivide,
    SlotWrite,
    StepReader,
    decode_changes,
)
from inference_svc.engine.ranks.traces import OwnTraces
from inference_svc.engine.transport.process_main import connect_to_parent, encode, portable
from inference_svc.errors import AdapterUnusable, CorruptImage, DeviceFull
from inference_svc.host.cpus import bound_to, compute_threads
from inference_svc.host.device_info import use_device
from inference_svc.model.description import Rank
from servicekit.errors import ServiceError
from servicekit.telemetry.logs import mark_process
from servicekit.telemetry.stacks import thread_stacks

logger = logging.getLogger(__name__)


def main() -> None:
    control = connect_to_parent()
    try:
        Follower(control, pickle.loads(control.recv_bytes())).run()
    except (EOFError, OSError):
        os._exit(1)  # rank 0 has ended: its memory is needed


class Follower:
    """A rank that computes its part of rank 0's steps."""

    def __init__(self, control: Connection, start: Start) -> None:
        self._control, self._start = control, start
        self._steps = Connection(start.steps_fd)
        self._lock = threading.Lock()
        self._pulls: RankImages | None = None
        self._reader = StepReader()
        self._traces = OwnTraces(None, self._send)
        config = start.config
        num_threads = compute_threads(config.num_threads, config.num_computing)
        stage = start.rank.index // config.tensor_parallel
        self._report = Report(start.rank, num_threads, stage)
        self._needs_pace = False

    def run(self) -> None:
        """Serves until rank 0 closes the sockets."""
        threading.Thread(target=self._listen, name="loadout-control", daemon=True).start()
        try:
            backend = self._build()
        except ExchangeFailed:
            self._leave()
        except Exception as error:
            self._send(NotBuilt(_named(portable(error), self._start.rank)))
            return
        assert self._pulls is not None
        self._send(Pong(progress(), self._status()))  # so that a built rank has a status
        self._send(Built(backend.num_pages))
        share = share_of(self._start.config, self._start.rank.index)
        self._report.processors = place_threads(backend, share)
        try:
            while True:
                frame = self._traces.receive(self._steps)
                with self._traces.step():
                    self._take(frame, backend, self._pulls)
        except EOFError:
            self._end(0)
        except ExchangeFailed:
            self._leave()
        except Exception as error:
            self._fail(error)

    def _end(self, status: int) -> NoReturn:
        """Ends the process, whatever its threads do, once its log is written, and leaves no file
        behind."""
        self._traces.give_up()
        logging.shutdown()
        os._exit(status)

    def _leave(self) -> NoReturn:
        """Ends the process, because another rank has ended or hangs."""
        with contextlib.suppress(OSError):
            self._send(LostContact())
        self._end(1)

    def _fail(self, error: Exception) -> NoReturn:
        """Ends the process, and says why."""
        logger.error("rank %d fails", self._start.rank.index, exc_info=error)
        with contextlib.suppress(OSError):
            self._send(StepFailed(f"{type(error).__name__}: {error}"))
        self._end(1)

    def _build(self) -> RankBackend[Any]:
        rank = self._start.rank
        config = config_of_rank(self._start.config, rank.index)
        mark_process(rank=rank.index)
        store = self._start.make_store(lambda content: self._send(StoreUpdate(content)))
        self._on_store_update = store.on_update
        num_threads = set_num_threads(config)
        use_device(config.device)
        decoder = describe(config, rank.index)
        factory = select_backend(config, decoder)
        if factory.name != self._start.backend or not isinstance(factory, RankFactory):
            ours = f"rank {rank.index} would compute with {factory.name}"
            raise ValueError(f"{ours}, and rank 0 with {self._start.backend}")
        self._traces = OwnTraces(factory.profiler_device, self._send)
        check_device_budget(config, decoder, factory)
        self._send(Described())
        self._report.exchange = exchange = self._start.meeting.join(rank)
        layout = layout_of(config, decoder)
        with bound_to(share_of(config, rank.index)):
            backend = factory.build_rank(config, decoder, layout, exchange)
        self._report.note_memory(backend)
        layout = with_unread(layout, config.model_dir, decoder)
        check = partial(layout.check_contents, max_added_tokens=config.max_added_tokens)
        max_known, parts = 4 * config.max_loras, config.expert_parallel
        self._pulls = RankImages(backend.pull_memory, backend.land, self._send, max_known, parts)
        pace = pull_pace(config, factory, num_threads)
        if pace is not None:
            pace.is_needed = lambda: self._needs_pace
        read, on_event = HeaderReader(layout).read, self._pulls.on_event
        self._pulls.puller = Puller(store, config.pull_workers, on_event, read, check, pace)
        return backend

    def _take(self, frame: bytes, backend: RankBackend[Any], images: RankImages) -> None:
        kind = frame[:1]
        if kind == STEP:
            with self._report.step():
                changes, data = self._reader.read(frame[1:])
                backend.apply(images.changes(changes))
                backend.follow(data)
            self._traces.stepped()
            return
        if kind in (TRACE, ABANDON):
            self._traces.take(frame)
            return
        if kind in (DIVIDE, IDLE):
            backend.apply(images.changes(decode_changes(frame[1:])))
            # With the same results as rank 0.
            if kind == DIVIDE:
                backend.divide_magnitudes()
            else:
                backend.use_idle_time()
            return
        answer: int | Exception = 0
        if kind == RESTORE:
            try:
                backend.restore()
            except (ExchangeFailed, StepAbandoned):
                raise
            except Exception as error:  # rank 0 may have it tried again
                answer = portable(error)
        else:
            answer = backend.free_memory(weights=kind == FREE_ALL)
        self._report.note_memory(backend)
        self._steps.send_bytes(encode(answer))

    def _listen(self) -> None:
        """Takes messages; ends the process when rank 0 has ended, or when one cannot be taken."""
        while True:
            try:
                frame = self._control.recv_bytes()
            except (EOFError, OSError):
                self._end(0)
            try:
                self._take_message(pickle.loads(frame))
            except Exception as error:
                self._fail(error)

    def _take_message(
        self, message: Ping | TellStacks | StoreUpdate | OpenPull | Pull | CancelPull
    ) -> None:
        if isinstance(message, Ping):
            self._needs_pace = message.needs_pace
            self._send(Pong(progress(), self._status()))
            return
        if isinstance(message, TellStacks):
            self._send(Stacks(thread_stacks()))
            return
        if isinstance(message, StoreUpdate):
            self._on_store_update(message.content)  # these follow Built
            return
        assert self._pulls is not None, "pulls follow Built"
        if isinstance(message, OpenPull):
            self._pulls.open(message)
        elif isinstance(message, Pull):
            self._pulls.start(message)
        else:
            self._pulls.cancel(message.number)

    def _status(self) -> RankStatus | None:
        pulls = self._pulls
        if pulls is None:
            return None
        return self._report.status(pulls.pulled_bytes, pulls.num_running)

    def _send(self, message: object) -> None:
        with self._lock:
            self._control.send_bytes(encode(message))


class RankImages:
    """This rank's parts of adapters: being pulled, and in the arena. Of the latter at most
    `max_known` are remembered, more than the table has rows."""

    puller: Puller

    def __init__(
        self,
        memory: memoryview,
        land: Callable[[Sequence[Extent]], None],
        send: Any,
        max_known: int,
        expert_parallel: int,
    ) -> None:
        """`memory` and `land`: see `RankBackend`."""
        self._memory, self._land, self._send, self._max_known = memory, land, send, max_known
        self._expert_parallel = expert_parallel
        self._lock = threading.Lock()
        self._jobs: dict[int, PullJob] = {}
        self._orders: dict[PullJob, OpenPull | Pull] = {}
        self._errors: dict[PullJob, ServiceError] = {}
        self._known: OrderedDict[str, tuple[ImageHeader, tuple[Extent, ...]]] = OrderedDict()
        self._used: dict[int, str] = {}
        self.pulled_bytes = 0

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    def open(self, order: OpenPull | Pull) -> None:
        """Begins a pull. One without extents waits for them when it knows its size."""
        job = PullJob(order.digest, order.layout_id)
        with self._lock:
            self._jobs[order.number], self._orders[job] = job, order
        self.puller.start(job)

    def start(self, order: Pull) -> None:
        """Begins a pull to these extents, or goes on with an open one, which may have ended."""
        if not order.is_open:
            self.open(order)
            return
        with self._lock:
            job = self._jobs.get(order.number)
            if job is None:
                return
            self._orders[job] = order
        if job.grant(ImageSink(self._memory, order.extents)):
            self.puller.start(job)

    def cancel(self, number: int) -> None:
        with self._lock:
            job = self._jobs.get(number)
        if job is not None:
            self.puller.cancel(job)

    def on_event(self, event: PullEvent) -> None:
        """Takes an event of a pull thread."""
        job = event.job
        order = self._orders[job]
        if isinstance(event, PullDone):
            assert isinstance(order, Pull)
            event = landed(event, order.extents, self._land)
        if isinstance(event, PullOpened):
            if isinstance(order, OpenPull):
                self._send(Opened(order.number, event.header))
                return
            try:
                check_alike(event.header.segments, order.segments, self._expert_parallel)
            except ServiceError as refusal:
                self._errors[job] = refusal
                self.puller.cancel(job)
            else:
                if job.grant(ImageSink(self._memory, order.extents)):
                    self.puller.start(job)
            return
        with self._lock:
            del self._jobs[order.number], self._orders[job]
            if isinstance(event, PullDone):
                assert job.progress.header is not None
                assert isinstance(order, Pull)
                self.pulled_bytes += job.progress.header.total_bytes
                self._known[job.digest] = job.progress.header, order.extents
                self._known.move_to_end(job.digest)
        error = self._errors.pop(job, None)
        if isinstance(event, PullFailed):
            error = error or event.error
        self._send(PullEnded(order.number, isinstance(event, PullDone), error))

    def changes(self, changes: Sequence[Change]) -> list[ResidencyChange]:
        """Returns rank 0's changes as this rank makes them."""
        return [self._own(each) for each in changes]

    def _own(self, change: Change) -> ResidencyChange:
        if isinstance(change, SlotWrite):
            return TableWrite(self._resident(change))
        if isinstance(change, SlotDivide):
            return DivideMagnitudes(self._resident(change))
        return change

    def _resident(self, change: SlotWrite | SlotDivide) -> Resident:
        with self._lock:
            header, extents = self._known[change.digest]
            self._used[change.slot] = change.digest
            in_use = set(self._used.values())
            for digest in list(self._known)[: -self._max_known]:
                if digest not in in_use:
                    del self._known[digest]
        rank = max((segment.rank for segment in header.segments), default=0)
        return Resident(header, change.slot, extents, rank)


def _named(error: Exception, rank: Rank) -> Exception:
    """Returns an error with the rank's name, unless it is of the model, which all ranks read."""
    if isinstance(error, ServiceError | OSError):
        return error
    kinds = (DeviceFull, ValueError, RuntimeError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
    return kind(f"rank {rank.index}: {error}")


def check_alike(own: Sequence[Segment], first: Sequence[Segment], expert_parallel: int) -> None:
    """Checks that a rank's image has the segments of its stage's first rank's at the same offsets,
    so that it lies in the same extents; scales may differ. `expert_parallel` is how many parts of
    the experts ranks have.

    Raises AdapterUnusable for experts whose A and B differ in size between these parts, else
    CorruptImage.
    """
    if [each._replace(scale=1.0) for each in own] == [each._replace(scale=1.0) for each in first]:
        return
    if expert_parallel > 1 and [_place(each) for each in own] == [_place(each) for each in first]:
        raise AdapterUnusable(
            "its experts have A and B of different sizes, or some have none: with "
            f"--expert-parallel {expert_parallel} each process must get as many bytes as the "
            "others; serve it without the setting",
            subject="adapter",
        )
    reason = "the store's image for another rank has other segments"
    raise CorruptImage(f"{reason}; upgrade the store if it is older than this server")


def _place(segment: Segment) -> tuple[int, SegmentKind]:
    return segment.target, segment.kind
