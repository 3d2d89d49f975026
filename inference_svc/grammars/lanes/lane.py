"""The processes that compute masks for running sequences, each with a thread of the engine's.

A process writes masks to memory that the engine reads. Where a step's rows only take tokens, the
engine's own thread sends them in one message, and takes the answer: to wake a lane's thread twice
would cost the engine more than the message. The lane's thread has all other work, and takes an
answer that is late.

All grammars begin in the fast lane unless their check found them slow. A grammar that turns out to
be slow goes on in the slow lane, whose rows wait for each other. There one row is computed at a
time. Rows for which a process may have ended take a turn there, too: only the row that a process
ends with while it computes nothing else is blamed, and one that is blamed again fails alone.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.lanes.messages import Work, Written
from inference_svc.grammars.lanes.process import LaneProcess
from inference_svc.grammars.vocabulary import Vocabulary
from servicekit.sandbox.process import SandboxFailure

logger = logging.getLogger(__name__)

POLL_SECONDS = 2e-3
"""How often a lane asks for masks of grammars that are being compiled."""
MAX_ENDS = 2
"""A row that alone was computed when so many processes ended is taken to be the cause."""
MAX_SUSPICIONS = 4
"""A row that so many processes ended with, and other rows, stays in the slow lane."""
MAX_FAULTS = 3
"""So many faults of this machine after each other, and rows fail."""
FAULT_PAUSE_SECONDS = 0.5
"""The time from a fault to the next start."""
TOO_COSTLY = "takes too much time or memory: simplify it"
UNAVAILABLE = "this server cannot compute forms of answers now: try again later, or another server"


class Row:
    """A running sequence, as the engine and its lane know it.

    `mask` has a bit for each token of the model that may come next; None while it is computed. It
    lies in its lane's memory: copy it to look twice. The answer `may_end` instead. `error` says why
    there will be no mask, which is the server's fault if it `is_fault`. A row that `was_late` is
    not computed before its mask is there; `is_awaited` asks for a notice then. `num_late` tokens in
    a row had late masks; since there were too many of them, it has waited for `num_patient` masks.
    """

    # A step looks at each row several times, in memory that the model has displaced from caches.
    __slots__ = (
        "error",
        "grammar",
        "id",
        "is_awaited",
        "is_fault",
        "lane",
        "mask",
        "may_end",
        "num_ends",
        "num_late",
        "num_patient",
        "num_suspicions",
        "request_id",
        "returns_to",
        "tenant",
        "tokens",
        "was_late",
    )

    def __init__(self, request_id: str, grammar: Grammar, tenant: str, tokens: list[int]) -> None:
        self.request_id = request_id
        self.grammar = grammar
        self.tenant = tenant
        self.tokens = tokens
        self.mask: memoryview | bytes | None = None
        self.may_end = False
        self.error = ""
        self.is_fault = False
        self.was_late = False
        self.num_late = 0
        self.num_patient = 0
        self.is_awaited = False
        self.num_ends = 0
        self.num_suspicions = 0
        self.id = 0
        self.lane: Lane | None = None
        self.returns_to: Lane | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its next token can be chosen, or will never be."""
        return self.mask is not None or bool(self.error)


@dataclass
class LaneCounts:
    """Sums over all lanes since the start."""

    num_opened: int = 0
    num_hits: int = 0
    num_masks: int = 0
    num_late: int = 0
    num_restarts: int = 0
    compile_s: float = 0.0
    mask_s: float = 0.0


@dataclass
class Board:
    """The state that lanes and the engine share, under one lock: `ready` tells the engine of masks.
    `notify` is called, in a lane's thread, when an awaited mask is there."""

    notify: Callable[[], None]
    lock: threading.RLock = field(default_factory=threading.RLock)
    ready: threading.Condition = field(init=False)
    counts: LaneCounts = field(default_factory=LaneCounts)
    failed: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ready = threading.Condition(self.lock)

    def fail(self, row: Row, error: str) -> None:
        """Says why a row has no further mask."""
        row.error = error
        self.failed.append(row)


class _Open(NamedTuple):
    row: Row
    tokens: list[int]
    id: int


class _Step(NamedTuple):
    row: Row
    token: int
    id: int


class _Close(NamedTuple):
    id: int


class _LaneClosed(Exception):
    """The lane ends while its process computes."""


class Lane:
    """A process that computes masks, and the thread that talks to it."""

    def __init__(
        self,
        board: Board,
        vocabulary: Vocabulary,
        max_rows: int,
        ids: itertools.count[int],
        name: str,
        slower: Lane | None = None,
    ) -> None:
        """`max_rows` are open at once. `slower`: the lane of rows that turn out to be slow; None:
        this is the slow one."""
        self._board = board
        self._slower = slower
        self._process = LaneProcess(vocabulary, max_rows, self._check_open, is_nice=slower is None)
        self._ids = ids
        self._rows: dict[int, Row] = {}
        self._due: set[int] = set()  # rows that the process owes a mask
        self._has_more = False  # and has not computed for lack of time
        self._is_compiling = False
        self._stuck: int | None = None
        self._is_asking = False  # the thread is about to ask, or waits for an answer
        self._is_sent = False  # the engine's thread has asked, and has no answer yet
        self._is_handed = False  # nor will it take that
        self._is_unsound = False  # the process has answered with bytes that are no answer
        self._num_faults = 0
        self._work: deque[_Open | _Step | _Close] = deque()
        # Of its own: a notice to all would wake threads that have nothing to do.
        self._changed = threading.Condition(board.lock)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"loadout-{name}", daemon=True)
        self._thread.start()

    @property
    def is_slow(self) -> bool:
        return self._slower is None

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def process_id(self) -> int | None:
        """The process that computes; None while there is none."""
        return self._process.pid

    def is_opening(self, row: Row) -> bool:
        """Whether the process owes a row its mask."""
        return row.id in self._due and self._process.pid is not None

    # Called with the board's lock held.

    def open(self, row: Row) -> None:
        if row.mask is not None:
            row.mask = bytes(row.mask)  # others may have its slot before it is used
        row.lane, row.id = self, next(self._ids)
        self._rows[row.id] = row
        self._work.append(_Open(row, list(row.tokens), row.id))
        self._changed.notify()

    def step(self, row: Row, token: int) -> None:
        """Has the next mask computed after `wake`."""
        self._work.append(_Step(row, token, row.id))

    def close_row(self, row: Row) -> None:
        if self._rows.pop(row.id, None) is not None:
            self._due.discard(row.id)
            self._work.append(_Close(row.id))
            self._changed.notify()

    def wake(self) -> None:
        """Has the work done that has come by `step`: by this thread if all of it is tokens, and the
        process waits for them."""
        if not self._work:
            return
        steps = [(each.id, each.token) for each in self._work if isinstance(each, _Step)]
        is_idle = not (self.is_slow or self._is_asking or self._is_owed)
        if is_idle and len(steps) == len(self._work) and self._process.send_at_once(Work(steps)):
            self._work.clear()
            self._due.update(row_id for row_id, _ in steps)
            self._is_sent = True
        else:
            self._changed.notify()

    @property
    def has_sent(self) -> bool:
        """Whether `take_answer` takes an answer: the lane's thread does not."""
        return self._is_sent and not self._is_handed and not self._is_asking

    def take_answer(self, wait_s: float) -> None:
        """Waits so long for the answer to steps that `wake` has sent. If there is none, or it is no
        usual one, the lane's thread takes it."""
        try:
            written = self._process.take_answer(wait_s)
            if written is None:
                self.hand_over()
            else:
                self._take(written)
        except Exception:
            logger.exception("a process for grammars gives an answer that is none")
            self._is_unsound = True
        if self._has_turn:
            self._changed.notify()

    def hand_over(self) -> None:
        """Lets the lane's thread take an answer that this thread does not wait for."""
        with self._board.lock:
            if self.has_sent:
                self._is_handed = True
                self._changed.notify()

    # Called without it.

    def close(self) -> None:
        """Ends the thread and the process; what it computes is lost."""
        with self._board.lock:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    # In the lane's thread.

    def _run(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                self._do(work)
        except _LaneClosed:
            pass
        finally:
            self._process.close()

    def _next_work(self) -> list[_Open | _Step | _Close] | None:
        """Returns the work to do now, [] to ask for masks that the process owes; None at the
        end. From here on the engine's thread asks nothing."""
        with self._board.lock:
            self._is_asking = False
            while not (self._has_turn or self._is_closed):
                self._changed.wait()
            ask_s = time.monotonic() + (0.0 if self._has_more else POLL_SECONDS)
            while not (self._num_doable() or self._is_handed or self._is_closed):
                left_s = ask_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._is_asking = True
            if self._is_closed:
                return None
            return [self._work.popleft() for _ in range(self._num_doable())]

    @property
    def _has_turn(self) -> bool:
        """Whether the thread has anything to do: not while the engine's waits for masks."""
        is_owed = self._is_owed and not self._is_sent
        return bool(self._num_doable()) or is_owed or self._is_handed or self._is_unsound

    @property
    def _is_owed(self) -> bool:
        return bool(self._due) or self._is_compiling

    def _num_doable(self) -> int:
        """Returns how much of the work can be done now: in the slow lane one row's at a time."""
        if self._slower is not None:
            return len(self._work)
        if not self._is_owed:
            return min(1, len(self._work))
        return sum(1 for _ in itertools.takewhile(_is_close, self._work))

    def _do(self, work: list[_Open | _Step | _Close]) -> None:
        try:
            try:
                if self._is_unsound:
                    raise ValueError("an answer is none")
                if self._is_sent:
                    self._take(self._process.receive())
                if work or self._is_owed:
                    self._process.start()
                    self._take(self._process.ask(self._message(work)))
            except SandboxFailure as error:
                self._end_because(str(error), None)
                return
            if self._stuck is not None:
                self._end_because("it compiles for too long, or cannot", {self._stuck})
            self._num_faults = 0
        except _LaneClosed:
            raise
        except Exception:
            # This machine has too few of something: no row is the cause.
            self._fault()

    def _message(self, work: list[_Open | _Step | _Close]) -> Work:
        """Returns the work as a message, without rows that have been closed since."""
        message = Work()
        with self._board.lock:
            for each in work:
                if isinstance(each, _Close):
                    self._process.free_slot(each.id)
                    message.closes.append(each.id)
            for each in work:
                if isinstance(each, _Close) or each.id not in self._rows:
                    continue
                self._due.add(each.id)
                if isinstance(each, _Step):
                    message.steps.append((each.id, each.token))
                    continue
                self._board.counts.num_opened += 1
                message.opens.append(_opening(each, self._process.give_slot(each.id)))
        return message

    def _end_because(self, reason: str, blamed: set[int] | None) -> None:
        """Ends the process, and blames these rows; None: all that it owes a mask."""
        logger.warning("a grammar's process ended: %s", reason)
        self._process.end()
        with self._board.lock:
            self._restart(set(self._due) if blamed is None else blamed)

    def _fault(self) -> None:
        logger.exception("a process for grammars cannot start or answer")
        self._process.end()
        self._num_faults += 1
        with self._board.lock:
            if self._num_faults >= MAX_FAULTS:
                for row in self._rows.values():
                    row.is_fault = True
                    self._board.fail(row, UNAVAILABLE)
                self._rows.clear()
            self._restart(set())
            end_s = time.monotonic() + FAULT_PAUSE_SECONDS
            while not self._is_closed and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise _LaneClosed

    # In either thread.

    def _take(self, written: Written) -> None:
        counts, notifies = self._board.counts, False
        with self._board.lock:
            self._is_sent = self._is_handed = False
            self._has_more, self._is_compiling = written.has_more, written.is_busy
            self._stuck = written.stuck
            counts.num_hits += written.num_hits
            counts.compile_s += written.compile_s
            counts.mask_s += written.seconds
            counts.num_masks += len(written.masks)
            for row_id, num_tokens, may_end in written.masks:
                self._due.discard(row_id)
                row = self._rows.get(row_id)
                if row is not None and num_tokens == len(row.tokens):
                    row.mask, row.may_end = self._process.mask(row_id), may_end
                    notifies |= row.is_awaited
                    if row.returns_to is not None:
                        _move(row, row.returns_to)
            for row_id, error in written.errors:
                self._due.discard(row_id)
                self._process.free_slot(row_id)
                row = self._rows.pop(row_id, None)
                if row is not None:
                    self._board.fail(row, error)
                    notifies = True
            for row_id in written.slow:
                row = self._rows.get(row_id)
                if row is not None and self._slower is not None:
                    _move(row, self._slower)
            self._board.ready.notify()
        if notifies:
            self._board.notify()

    # In the lane's thread, with the board's lock held.

    def _restart(self, blamed: set[int]) -> None:
        """Goes on after the process has ended, for which these rows may be the cause."""
        self._board.counts.num_restarts += 1
        self._due.clear()
        self._has_more = self._is_compiling = False
        self._is_sent = self._is_handed = self._is_unsound = False
        self._stuck = None
        # All rows are opened anew with their tokens, the ones that others must not wait for last.
        self._work.clear()
        rows = sorted(self._rows.values(), key=lambda row: row.id in blamed)
        self._rows.clear()
        for row in rows:
            if row.id not in blamed:
                self.open(row)
            elif len(blamed) > 1:
                row.num_suspicions += 1
                row.returns_to = self if row.num_suspicions < MAX_SUSPICIONS else None
                (self._slower or self).open(row)
            else:
                row.num_ends += 1
                row.returns_to = None
                if row.num_ends == MAX_ENDS:
                    self._board.fail(row, TOO_COSTLY)
                else:
                    (self._slower or self).open(row)
        self._board.ready.notify()
        if self._board.failed:
            self._board.notify()


def _move(row: Row, lane: Lane) -> None:
    """Lets a row go on in another lane, from its tokens so far."""
    row.returns_to = None
    if row.lane is not None:
        row.lane.close_row(row)
    lane.open(row)


def _is_close(work: _Open | _Step | _Close) -> bool:
    return isinstance(work, _Close)


def _opening(work: _Open, slot: int) -> dict[str, Any]:
    grammar = work.row.grammar
    return {
        "id": work.id,
        "slot": slot,
        "tenant": work.row.tenant,
        "key": grammar.key,
        "kind": grammar.kind.value,
        "source": grammar.source,
        "tokens": work.tokens,
    }
