"""The processes that compute masks for running sequences, each with a thread of the engine's.

All grammars begin in the fast lane unless their check found them slow. A grammar that turns out to
be slow goes on in the slow lane, whose rows wait for each other. There one row is computed at a
time. Rows for which a process may have ended take a turn there, too: only the row that a process
ends with while it computes nothing else is blamed, and one that is blamed again fails alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.vocabulary import Vocabulary
from servicekit.sandbox.process import Answer, Limits, SandboxFailure, SandboxProcess, Task

logger = logging.getLogger(__name__)

MEMORY_BYTES = 1 << 30
"""Memory of a lane, with the vocabulary's."""
WALL_SECONDS = 20.0
TASK = Task(Path(__file__).with_name("task.py"), Limits(MEMORY_BYTES, wall_seconds=WALL_SECONDS))
POLL_SECONDS = 2e-3
"""How often a lane asks for masks of grammars that are being compiled."""
SLOW_NICENESS = 19
HEADER_BYTES = 1 << 20
"""More than the header of an answer can have."""
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

    `mask` has a bit for each token of the model that may come next; None while it is computed. The
    answer `may_end` instead. `error` says why there will be no mask, which is the server's fault
    if it `is_fault`. A row that `was_late` is not computed before its mask is there; `is_awaited`
    asks for a notice then. `num_late` tokens in a row had late masks; since there were too many of
    them, it has waited for `num_patient` masks.
    """

    def __init__(self, request_id: str, grammar: Grammar, tenant: str, tokens: list[int]) -> None:
        self.request_id = request_id
        self.grammar = grammar
        self.tenant = tenant
        self.tokens = tokens
        self.mask: bytes | None = None
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


class _LaneClosed(Exception):
    """The lane ends while its process computes."""


class Lane:
    """A process that computes masks, and the thread that talks to it."""

    def __init__(
        self,
        board: Board,
        vocabulary: Vocabulary,
        ids: itertools.count[int],
        name: str,
        slower: Lane | None = None,
    ) -> None:
        """`slower`: the lane of rows that turn out to be slow; None: this is the slow one."""
        self._board = board
        self._vocabulary = vocabulary
        self._slower = slower
        self._ids = ids
        self._rows: dict[int, Row] = {}
        self._due: set[int] = set()  # rows that the process owes a mask
        self._has_more = False  # and has not computed for lack of time
        self._is_compiling = False
        self._num_faults = 0
        self._work: deque[_Open | _Step | _Close] = deque()
        # Of its own: a notice to all would wake threads that have nothing to do.
        self._changed = threading.Condition(board.lock)
        self._process: SandboxProcess | None = None
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
        process = self._process
        return None if process is None else process.pid

    def is_opening(self, row: Row) -> bool:
        """Whether the process owes a row its mask."""
        return row.id in self._due and self._process is not None

    # Called with the board's lock held.

    def open(self, row: Row) -> None:
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
        """Has the work done that has come by `step`."""
        if self._work:
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
            self._end_process()

    def _next_work(self) -> list[_Open | _Step | _Close] | None:
        """Returns the work to do now, [] to ask for masks that the process owes; None at the
        end."""
        with self._board.lock:
            while not (self._num_doable() or self._is_owed or self._is_closed):
                self._changed.wait()
            ask_s = time.monotonic() + (0.0 if self._has_more else POLL_SECONDS)
            while not (self._num_doable() or self._is_closed):
                left_s = ask_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            if self._is_closed:
                return None
            return [self._work.popleft() for _ in range(self._num_doable())]

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
        with self._board.lock:
            # Without rows that have been closed since.
            work = [each for each in work if isinstance(each, _Close) or each.id in self._rows]
            for each in work:
                if isinstance(each, _Open):
                    self._board.counts.num_opened += 1
                if not isinstance(each, _Close):
                    self._due.add(each.id)
            num_due = len(self._due)
        try:
            self._start_process()
            try:
                header, masks = _parts(self._ask(work, num_due))
            except SandboxFailure as error:
                self._end_because(str(error), None)
                return
            with self._board.lock:
                self._take(header, masks)
            if header["stuck"] is not None:
                self._end_because("it compiles for too long, or cannot", {header["stuck"]})
            self._num_faults = 0
        except _LaneClosed:
            raise
        except Exception:
            # This machine has too few of something: no row is the cause.
            self._fault()

    def _start_process(self) -> None:
        if self._process is not None:
            return
        process = SandboxProcess(TASK, ends_with_starter=True)
        try:
            if self._slower is None:
                _lower_priority(process.pid)
            process.ask({"vocabulary": self._vocabulary.packed}, 0, self._check_open)
        except BaseException:
            process.end()
            raise
        self._process = process

    def _ask(self, work: list[_Open | _Step | _Close], num_due: int) -> Answer:
        assert self._process is not None
        request = {
            "open": [_opening(each) for each in work if isinstance(each, _Open)],
            "step": [[each.id, each.token] for each in work if isinstance(each, _Step)],
            "close": [each.id for each in work if isinstance(each, _Close)],
        }
        max_bytes = HEADER_BYTES + num_due * self._vocabulary.mask_bytes
        return self._process.ask(request, max_bytes, self._check_open)

    def _end_because(self, reason: str, blamed: set[int] | None) -> None:
        """Ends the process, and blames these rows; None: all that it owes a mask."""
        logger.warning("a grammar's process ended: %s", reason)
        self._end_process()
        with self._board.lock:
            self._restart(set(self._due) if blamed is None else blamed)

    def _fault(self) -> None:
        logger.exception("a process for grammars cannot start or answer")
        self._end_process()
        self._num_faults += 1
        with self._board.lock:
            if self._num_faults >= MAX_FAULTS:
                for row in self._rows.values():
                    row.is_fault = True
                    self._fail(row, UNAVAILABLE)
                self._rows.clear()
            self._restart(set())
            end_s = time.monotonic() + FAULT_PAUSE_SECONDS
            while not self._is_closed and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise _LaneClosed

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    # There, with the board's lock held.

    def _take(self, header: dict[str, Any], masks: memoryview) -> None:
        size, counts, notifies = self._vocabulary.mask_bytes, self._board.counts, False
        self._has_more, self._is_compiling = header["has_more"], header["is_busy"]
        counts.num_hits += header["num_hits"]
        counts.compile_s += header["compile_s"]
        counts.mask_s += header["seconds"]
        counts.num_masks += len(header["masks"])
        for place, (row_id, num_tokens, may_end) in enumerate(header["masks"]):
            self._due.discard(row_id)
            row = self._rows.get(row_id)
            if row is not None and num_tokens == len(row.tokens):
                row.mask = bytes(masks[place * size : (place + 1) * size])
                row.may_end = may_end
                notifies |= row.is_awaited
                if row.returns_to is not None:
                    self._move(row, row.returns_to)
        for row_id, error in header["errors"]:
            self._due.discard(row_id)
            row = self._rows.pop(row_id, None)
            if row is not None:
                self._fail(row, error)
                notifies = True
        for row_id in header["slow"]:
            row = self._rows.get(row_id)
            if row is not None and self._slower is not None:
                self._move(row, self._slower)
        self._board.ready.notify()
        if notifies:
            self._board.notify()

    def _fail(self, row: Row, error: str) -> None:
        row.error = error
        self._board.failed.append(row)

    def _move(self, row: Row, lane: Lane) -> None:
        """Lets a row go on in another lane, from its tokens so far."""
        row.returns_to = None
        self.close_row(row)
        lane.open(row)

    def _restart(self, blamed: set[int]) -> None:
        """Goes on after the process has ended, for which these rows may be the cause."""
        self._board.counts.num_restarts += 1
        self._due.clear()
        self._has_more = self._is_compiling = False
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
                    self._fail(row, TOO_COSTLY)
                else:
                    (self._slower or self).open(row)
        self._board.ready.notify()
        if self._board.failed:
            self._board.notify()


def _is_close(work: _Open | _Step | _Close) -> bool:
    return isinstance(work, _Close)


def _opening(work: _Open) -> dict[str, Any]:
    grammar = work.row.grammar
    return {
        "id": work.id,
        "tenant": work.row.tenant,
        "key": grammar.key,
        "kind": grammar.kind.value,
        "source": grammar.source,
        "tokens": work.tokens,
    }


def _parts(answer: Answer) -> tuple[dict[str, Any], memoryview]:
    data = memoryview(answer.content)
    end = 4 + int.from_bytes(data[:4], "big")
    return json.loads(bytes(data[4:end])), data[end:]


def _lower_priority(process_id: int) -> None:
    """Lowers the priority of a process that has just started."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process_id, SLOW_NICENESS)
