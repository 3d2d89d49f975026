"""The masks of running sequences, on the engine's side.

A step is computed while the masks for its tokens are. The engine waits a moment for masks that are
not there when it chooses tokens; rows whose masks are later than that are left out of the step, and
only they. Rows of the slow lane, and ones that are late again and again, are not computed before
their masks are there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.lanes.lane import Board, Lane, LaneCounts, Row
from inference_svc.grammars.vocabulary import Vocabulary

MAX_WAIT_SECONDS = 3e-3
"""How long a step waits for masks."""
MAX_LATE, PATIENT_MASKS = 3, 32
"""A row whose masks were late so many times in a row is not computed before they are there, for so
many masks: each wait is one of all rows of a step, and the row is computed twice."""
PATIENT_TOKENS = 256
"""Longer parts of prompts are not computed before their mask is there: to leave them out after
that would cost too much."""


class Masks:
    """Used by the engine's thread. `notify` is called in another thread when something that nothing
    else would wake the engine for has changed."""

    def __init__(self, notify: Callable[[], None], max_rows: int) -> None:
        """`max_rows` sequences have a grammar at once."""
        self._board = Board(notify)
        self._max_rows = max_rows
        self._vocabulary: Vocabulary | None = None
        self._lanes: tuple[Lane, Lane] | None = None
        self._has_accepted = False

    @property
    def counts(self) -> LaneCounts:
        return self._board.counts

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The fast lane and the slow one, once a sequence had a grammar."""
        return self._lanes or ()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Sets the vocabulary of all grammars; the first time counts. The processes start with the
        first sequence."""
        self._vocabulary = self._vocabulary or vocabulary

    def open(self, request_id: str, grammar: Grammar, tenant: str, tokens: list[int]) -> Row:
        """Has the mask computed of a sequence that starts, or starts again after these tokens."""
        fast, slow = self._lanes or self._start()
        row = Row(request_id, grammar, tenant, tokens)
        with self._board.lock:
            (slow if grammar.is_slow else fast).open(row)
        return row

    def _start(self) -> tuple[Lane, Lane]:
        assert self._vocabulary is not None, "the vocabulary comes before the first grammar"
        ids = itertools.count(1)
        shared = self._board, self._vocabulary, self._max_rows, ids
        slow = Lane(*shared, "slow-masks")
        self._lanes = Lane(*shared, "masks", slower=slow), slow
        return self._lanes

    def accept(self, row: Row, token: int) -> None:
        """Takes the token that was chosen with the row's mask; its next one is computed after
        `flush`."""
        self._has_accepted = True
        with self._board.lock:
            if row.num_late >= MAX_LATE:
                row.num_patient += 1
                if row.num_patient == PATIENT_MASKS:
                    row.num_late, row.num_patient = MAX_LATE - 1, 0
            row.mask = None
            row.tokens.append(token)
            if row.lane is not None and not row.error:
                row.lane.step(row, token)

    def flush(self) -> None:
        """Has the masks computed for the tokens of a step, all in one message."""
        if self._has_accepted:
            self._has_accepted = False
            with self._board.lock:
                for lane in self.lanes:
                    lane.wake()

    def close_row(self, row: Row) -> None:
        """Ends a row, whose sequence has ended or waits to start again."""
        with self._board.lock:
            if row.lane is not None:
                row.lane.close_row(row)

    def num_computable(self, row: Row, num_tokens: int, num_left: int) -> int:
        """Returns how many of `num_tokens` tokens of a sequence, which has `num_left`, the next
        step may compute: not the last one if it would be in vain."""
        if num_tokens < num_left:
            return num_tokens
        is_slow = row.lane is not None and row.lane.is_slow
        is_patient = is_slow or row.was_late or row.num_late >= MAX_LATE
        if num_tokens <= PATIENT_TOKENS and not is_patient:
            return num_tokens
        with self._board.lock:
            if row.is_ready:
                return num_tokens
            row.is_awaited = True
            if row.lane is not None:
                row.lane.hand_over()
        return num_tokens - 1

    def wait(self, rows: Iterable[Row]) -> set[int]:
        """Waits for the masks of these rows, and returns the `id()` of those that are late."""
        rows = list(rows)
        with self._board.lock:
            self._wait([row for row in rows if row.mask is None and not row.error])
            late = set()
            for row in rows:
                if row.mask is not None:
                    row.is_awaited = False
                    if row.was_late:
                        row.was_late = False
                    elif row.num_late < MAX_LATE:
                        row.num_late = 0
                    continue
                row.num_late += not row.was_late
                self._board.counts.num_late += 1
                row.was_late = row.is_awaited = True
                late.add(id(row))
            return late

    def _wait(self, missing: list[Row]) -> None:
        """Waits a moment for the masks of rows that have none."""
        end_s = time.monotonic() + MAX_WAIT_SECONDS
        while missing and (left_s := end_s - time.monotonic()) > 0:
            asked = (row.lane for row in missing if row.lane is not None)
            lane = next((each for each in asked if each.has_sent), None)
            if lane is None:
                self._board.ready.wait(left_s)
            else:
                lane.take_answer(left_s)
            missing = [row for row in missing if not row.is_ready]

    def pop_failed(self) -> list[Row]:
        """Returns the rows that have failed since the last call."""
        if not self._board.failed:
            return []
        with self._board.lock:
            failed, self._board.failed = self._board.failed, []
        return failed

    def close(self) -> None:
        """Ends the processes."""
        for lane in self.lanes:
            lane.close()
