"""The processes of the other ranks, as rank 0 starts and watches them."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inference_svc.backends.base import RankFactory
from inference_svc.backends.exchange import ExchangeFailed, Meeting
from inference_svc.core import EngineConfig
from inference_svc.engine.control.status_types import RankStatus
from inference_svc.engine.ranks.liveness import Limits
from inference_svc.engine.ranks.messages import (
    FREE,
    FREE_ALL,
    RESTORE,
    STEP,
    Built,
    Described,
    LostContact,
    NotBuilt,
    Opened,
    Ping,
    Pong,
    PullEnded,
    Stacks,
    Start,
    StepFailed,
    StoreUpdate,
    TellStacks,
    Traced,
)
from inference_svc.engine.ranks.peers import (
    DEATH_S,
    EXCHANGE_S,
    PING_S,
    SILENCE_S,
    OtherRank,
    RankProcess,
    start_ranks,
)
from inference_svc.engine.ranks.report import Held, RankStacks, Report
from inference_svc.errors import EngineFailed
from inference_svc.host.cpus import Share, compute_threads, unbind
from inference_svc.model.description import Rank
from inference_svc.model.sharding.exchange import Exchange

logger = logging.getLogger(__name__)

END_S = 10.0
"""How long a rank may take to end."""
FIRST_ANSWER_S = 300.0
"""How long a rank may take to its first answer: until then it imports its modules. On two busy
cores four ranks took more than two minutes once."""
STALL_S = 300.0
"""How long a rank may make no progress while it starts. Files that come over a network may have to
be fetched whole before the first byte of them is read."""


class Rendezvous(Protocol):
    """The place to which the ranks of other machines come; see `ranks.nodes`."""

    @property
    def others(self) -> Sequence[OtherRank]:
        """The ranks of other machines, which may not have come yet."""

    def open(
        self, meeting: Meeting, backend: str, on_missing: Callable[[EngineFailed], None]
    ) -> None:
        """Lets ranks come, and tells them these; calls `on_missing` if one does not."""

    @property
    def address(self) -> str:
        """The address of this machine at which the others reach it."""

    def close(self) -> None:
        """Lets no rank come any more. Idempotent."""


def _open_meeting(
    config: EngineConfig, factory: RankFactory, num_threads: int, rendezvous: Rendezvous | None
) -> Meeting:
    count, num_stages = config.num_ranks, config.pipeline_parallel
    address = "" if rendezvous is None else rendezvous.address
    return factory.open_meeting(count, num_threads, EXCHANGE_S, num_stages, address)


class RankGroup:
    """All ranks but the first. They begin to load the model when this is made.

    A rank that hangs is killed, also while it starts. `on_failure` is called once, from any thread,
    when a rank has ended, failed or does not answer after it was built; `on_pull_opened` and
    `on_pull_ended` with the index of a rank; `on_store_update` with a finding that a rank's store
    publishes, which the other ranks get, too; `on_traced` with a trace of a rank; `needs_pace` from
    any thread, to tell the other ranks about their pulls.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: RankFactory,
        make_store: Callable[[Callable[[Any], None]], Any],
        on_failure: Callable[[EngineFailed], None],
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.count = config.num_ranks
        self.failure: EngineFailed | None = None
        self.on_pull_opened: Callable[[int, Opened], None] = lambda index, opened: None
        self.on_pull_ended: Callable[[int, PullEnded], None] = lambda index, ended: None
        self.on_store_update: Callable[[Any], None] = lambda content: None
        self.on_traced: Callable[[Traced], None] = lambda traced: None
        self.needs_pace: Callable[[], bool] = lambda: False
        self._on_failure = on_failure
        self._is_asking = self._is_built = self._is_closing = False
        self._not_built: Exception | None = None
        self._failed, self._ended = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        num_local = len(config.local_ranks)
        self.share = Share(0, config.num_computing)
        num_threads = compute_threads(config.num_threads, config.num_computing)
        self.report = Report(Rank(0, self.count), num_threads)
        self._rendezvous = rendezvous
        self._threads: list[threading.Thread] = []
        with contextlib.ExitStack() as unused:
            if rendezvous is not None:
                unused.callback(rendezvous.close)
            self._meeting = _open_meeting(config, factory, num_threads, rendezvous)
            unused.callback(self._meeting.close)
            # The watch starts ranks: they end with the thread that starts them.
            started: Future[list[RankProcess]] = Future()
            self._threads.append(_run("ranks", self._watch, started, num_local))
            self.local = started.result()
            self.others = [*self.local, *(() if rendezvous is None else rendezvous.others)]
            unused.pop_all()
            unused.callback(self.close)
            self.stacks = RankStacks([each.name for each in self.others], self._ask_for_stacks)
            self._threads += [_run(each.name, self._read, each) for each in self.others]
            if rendezvous is not None:
                rendezvous.open(self._meeting, factory.name, self._miss)
            name, meeting = factory.name, self._meeting
            for each in self.local:
                each.send(Start(config, each.rank, make_store, name, meeting, each.steps_fd))
            unused.pop_all()
        self._is_asking = True  # pings follow Start

    def meet(self) -> Exchange:
        """Returns rank 0's exchange, once every rank is there. Raises the error of a rank that
        cannot load the model, and EngineFailed for a rank that ends."""
        self._expect(Described)
        try:
            exchange = self._meeting.join(Rank(0, self.count))
        except ExchangeFailed as error:
            raise self.blame(error) from error
        self.report.exchange = exchange
        return exchange

    def wait_until_built(self) -> int:
        """Waits until every rank has loaded its part, and watches them from then on; returns the
        least number of pages. Raises as `meet`."""
        found = self._expect(Built)
        for each in self.others:
            logger.info("%s is %s", each.name, each.place)
        return min(each.num_pages for each in found)

    def _expect(self, kind: type) -> list[Any]:
        """Returns the messages of all ranks of this kind; raises the first error of any."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._start_error or all(kind in each.said for each in self.others)
            )
            if self._start_error is not None:
                raise self._start_error
            self._is_built = kind is Built
            return [each.said[kind] for each in self.others]

    @property
    def _start_error(self) -> Exception | None:
        return self._not_built or self.failure

    def send_step(self, buffer: bytes) -> None:
        """Has all ranks compute a step, without waiting."""
        self._send_steps(STEP + buffer)

    def send_changes(self, kind: bytes, buffer: bytes) -> None:
        """Has all ranks make changes, without waiting, and then what this kind of frame says."""
        self._send_steps(kind + buffer)

    def begin_free(self, *, weights: bool) -> Callable[[], int]:
        """Has all ranks free their pages, or weights as well; the result waits for them, and
        returns the bytes. No step may be sent before that."""
        self._send_steps(FREE_ALL if weights else FREE)
        return self._collect

    def begin_restore(self) -> Callable[[], int]:
        """Has all ranks allocate their memory again; the result waits for them, and returns 0."""
        self._send_steps(RESTORE)
        return self._collect

    def _send_steps(self, frame: bytes) -> None:
        for each in self.others:
            self.send_to(each.rank.index, frame)

    def send_to(self, index: int, frame: bytes) -> None:
        """Sends a frame to one rank, behind the steps before. Raises EngineFailed."""
        rank = self.others[index - 1]
        try:
            rank.steps.send_bytes(frame)
        except OSError:  # it has ended, or takes no step
            raise self.lost(rank) from None

    def _collect(self) -> int:
        """Returns the sum of all ranks' answers; raises the first error among them."""
        total, errors = 0, []
        for each in self.others:
            try:
                answer = pickle.loads(each.steps.recv_bytes())
            except (EOFError, OSError):
                raise self.lost(each) from None
            if isinstance(answer, Exception):
                logger.error("%s: %s", each.name, answer)
                errors.append(answer)
            else:
                total += answer
        if errors:
            raise errors[0]
        return total

    def update_stores(self, content: Any, *, but: OtherRank | None = None) -> None:
        """Tells the stores of the ranks, but one, a finding of another process's store."""
        for each in self.others:
            if each is not but:
                each.send(StoreUpdate(content))

    def describe(self, backend: Held, pulled_bytes: int, num_pulls: int) -> tuple[RankStatus, ...]:
        """Returns all ranks' status. The arguments are rank 0's; see RankStatus."""
        self.report.note_memory(backend)
        others = (each.status for each in self.others)
        return self.report.status(pulled_bytes, num_pulls), *filter(None, others)

    @property
    def is_ended(self) -> bool:
        """Whether no rank computes or pulls any more."""
        return self._is_closing or self.failure is not None

    def lost(self, rank: OtherRank) -> EngineFailed:
        """Returns the failure of a rank that has ended; of one that another has left alone, the
        other's."""
        how = rank.end(DEATH_S)
        if rank.has_lost_contact:
            self._failed.wait(DEATH_S)
        return self._fail(f"{rank.name} {how}")

    def blame(self, error: Exception) -> Exception:
        """Returns the failure that an error of rank 0's step, or of its start, has: another rank's
        end or silence, why it cannot load the model, or its own."""
        if not isinstance(error, ExchangeFailed):
            return self._fail(f"rank 0 failed: {type(error).__name__}: {error}")
        self._failed.wait(0.0 if self._not_built else DEATH_S)
        failure = self._fail(f"ranks lost contact: {error}")
        return self._not_built or failure

    def _fail(self, why: str) -> EngineFailed:
        with self._changed:
            if self.failure is not None:
                return self.failure
            is_built = self._is_built
            if is_built:
                failure = EngineFailed.because(why)
            else:
                failure = EngineFailed(f"{why} while it started")
            self.failure = failure
            self._meeting.fail()
            self._failed.set()
            self._changed.notify_all()
        if is_built and not self._is_closing:
            logger.error("%s", why)
            self._on_failure(failure)
        return failure

    def _read(self, rank: OtherRank) -> None:
        """Takes a rank's messages until it ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = rank.receive()
                rank.liveness.answered()
                if isinstance(message, Pong):
                    rank.on_pong(message)
                elif isinstance(message, StoreUpdate):
                    self.on_store_update(message.content)
                    self.update_stores(message.content, but=rank)
                elif isinstance(message, Stacks):
                    self.stacks.take(rank.name, message.text)
                elif isinstance(message, Traced):
                    self.on_traced(message)
                elif isinstance(message, Opened):
                    self.on_pull_opened(rank.rank.index, message)
                elif isinstance(message, PullEnded):
                    self.on_pull_ended(rank.rank.index, message)
                elif isinstance(message, StepFailed):
                    rank.why = message.why
                elif isinstance(message, LostContact):
                    rank.has_lost_contact = True
                else:
                    self._on_started(rank, message)
        rank.is_read.set()
        if not self._is_closing:
            self.lost(rank)

    def _miss(self, failure: EngineFailed) -> None:
        """Ends the start, because ranks have not come."""
        with self._changed:
            self._not_built = self._not_built or failure
            self._changed.notify_all()

    def _on_started(self, rank: OtherRank, message: Described | Built | NotBuilt) -> None:
        with self._changed:
            if isinstance(message, NotBuilt):
                logger.error("%s cannot load the model: %s", rank.name, message.error)
                self._not_built = self._not_built or message.error
                self._meeting.fail()  # rank 0 may wait for it
            rank.said[type(message)] = message
            rank.liveness.waits_for_steps = isinstance(message, Built)
            self._changed.notify_all()

    def _watch(self, started: Future[list[RankProcess]], num_local: int) -> None:
        """Starts this machine's ranks, and asks each rank whether it answers, until all have
        ended."""
        unbind()  # processes inherit it
        try:
            local = start_ranks(range(1, num_local), self.count, self._meeting.files)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(local)
        while not self._ended.wait(PING_S):
            for each in self.others if self._is_asking and not self._is_closing else ():
                if each.has_come:
                    self._ask(each)

    def _ask(self, rank: OtherRank) -> None:
        """Kills a rank that hangs. A rank of another machine ends when it hears nothing."""
        limits = Limits(PING_S, FIRST_ANSWER_S, SILENCE_S, STALL_S)
        fault = rank.liveness.fault(limits, serves=self._is_built)
        if fault:
            rank.kill(fault)
        rank.liveness.asked()
        rank.send(Ping(self.needs_pace()))

    def _ask_for_stacks(self) -> None:
        for each in self.others:
            each.send(TellStacks())

    def close(self) -> None:
        """Ends all ranks, and all waits for them. Idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        if self._rendezvous is not None:
            self._rendezvous.close()
        for each in self.others:
            each.hang_up()
        deadline_s = time.monotonic() + END_S
        for each in self.others:
            logger.debug("%s %s", each.name, each.end(max(0.0, deadline_s - time.monotonic())))
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for each in self.others:
            each.close()
        self._meeting.close()


def _run(name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts a thread that does this work."""
    thread = threading.Thread(target=work, args=args, name=f"loadout-{name}", daemon=True)
    thread.start()
    return thread
