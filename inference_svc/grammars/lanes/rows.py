"""The sequences of a lane's process: their grammars, compiled, and the masks that are due."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inference_svc.grammars.compiling import (
    COSTLY_STEP_SECONDS,
    MAX_ERROR_CHARS,
    MAX_SLOW_STEPS,
    SLOW_STEP_SECONDS,
    Refused,
    Tokens,
    check_matcher,
    compile_grammar,
)
from inference_svc.grammars.lanes.memory import WrittenMasks
from inference_svc.grammars.lanes.messages import Work, Written

ANSWER_SECONDS = 2e-3
"""Processor time after which a lane answers with the masks that it has."""
UNKNOWN_COST_SECONDS, COST_WEIGHT = 1e-3, 10.0
"""What a row's first mask is taken to cost; and how much longer a row waits for each second of its
cost, where others are due."""
SLICE_TOKENS = 32
"""Tokens that a row takes before others may have their masks: a row that begins again after a
preemption has thousands."""
TOKEN_SECONDS = 20e-6
"""The time that one of these tokens is taken to cost."""
MAX_OPEN_SECONDS = 20.0
"""A grammar that compiles for longer ends its process: no check has let it pass."""
MAX_TEMPLATES, MAX_TEMPLATE_CHARS = 64, 1 << 20
TENANT_TEMPLATES, TENANT_TEMPLATE_CHARS = 16, 512 << 10
"""Compiled grammars that are kept for other requests: of all tenants, and of one."""


class Templates:
    """The grammars that were used last, compiled, of each tenant."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()

    def get(self, tenant: str, key: str) -> Any:
        """Returns a matcher at its beginning; None if it is to be compiled."""
        found = self._known.get((tenant, key))
        if found is None:
            return None
        self._known.move_to_end((tenant, key))
        return found[0].deep_copy()

    def add(self, tenant: str, key: str, matcher: Any, num_chars: int) -> None:
        self._known[tenant, key] = matcher.deep_copy(), num_chars
        while self._is_over(tenant, TENANT_TEMPLATES, TENANT_TEMPLATE_CHARS):
            self._drop(tenant)
        while self._is_over(None, MAX_TEMPLATES, MAX_TEMPLATE_CHARS):
            self._drop(None)

    def _is_over(self, tenant: str | None, max_count: int, max_chars: int) -> bool:
        sizes = [size for (of, _), (_, size) in self._known.items() if tenant in (None, of)]
        return len(sizes) > max_count or sum(sizes) > max_chars

    def _drop(self, tenant: str | None) -> None:
        del self._known[next(key for key in self._known if tenant in (None, key[0]))]


class Row:
    """A running sequence: the slot that its masks are written to, its matcher once it is compiled,
    and tokens that came before. `cost_s` is the time of its last mask."""

    def __init__(self, tenant: str, slot: int, tokens: list[int]) -> None:
        self.tenant = tenant
        self.slot = slot
        self.backlog = tokens
        self.matcher: Any = None
        self.num_tokens = 0
        self.num_slow = 0
        self.cost_s = UNKNOWN_COST_SECONDS
        self.due_s = time.monotonic()

    @property
    def patience_s(self) -> float:
        """Its place among its tenant's: cheap ones first, but none waits for ever."""
        return self.due_s + COST_WEIGHT * (self.cost_s + TOKEN_SECONDS * len(self.backlog))


class Compiler:
    """Compiles grammars in a thread, since others' masks must not wait for that: one at a time,
    tenants in turn. It knows at most one grammar for each open row, and the one that it compiles.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.num_hits = 0
        self.compile_s = 0.0
        self._tokens = tokens
        self._templates = Templates()
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, dict[int, dict[str, Any]]] = OrderedDict()
        self._done: dict[int, Any] = {}
        self._is_running = False
        self._current: tuple[int, float] | None = None

    @property
    def is_busy(self) -> bool:
        return self._is_running

    @property
    def stuck(self) -> int | None:
        """The row whose grammar takes longer or more memory than any that a check let pass."""
        current = self._current
        if current is None or time.monotonic() <= current[1] + MAX_OPEN_SECONDS:
            return None
        return current[0]

    def add(self, request: dict[str, Any]) -> None:
        with self._lock:
            self._waiting.setdefault(request["tenant"], {})[request["id"]] = request
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._run)

    def discard(self, row_id: int, tenant: str) -> None:
        """Forgets the grammar of a row that is closed."""
        with self._lock:
            self._done.pop(row_id, None)
            waiting = self._waiting.get(tenant, {})
            if waiting.pop(row_id, None) is not None and not waiting:
                del self._waiting[tenant]

    def pop_done(self) -> dict[int, Any]:
        """Returns a matcher or a Refused by the ids of rows."""
        with self._lock:
            done, self._done = self._done, {}
            return done

    def _run(self) -> None:
        while (request := self._next()) is not None:
            try:
                found = self._open(request)
            except Refused as error:
                found = error
            except BaseException:  # out of memory, or a bug: this row's, and no other's
                self._current = request["id"], -math.inf
                return
            with self._lock:
                self._done[request["id"]] = found

    def _next(self) -> dict[str, Any] | None:
        with self._lock:
            self._current = None
            if not self._waiting:
                self._is_running = False
                return None
            tenant, waiting = self._waiting.popitem(last=False)
            row_id = next(iter(waiting))
            request = waiting.pop(row_id)
            if waiting:
                self._waiting[tenant] = waiting
            self._current = row_id, time.monotonic()
            return request

    def _open(self, request: dict[str, Any]) -> Any:
        start_s = time.thread_time()
        tenant, key, source = request["tenant"], request["key"], request["source"]
        matcher = self._templates.get(tenant, key)
        if matcher is None:
            matcher = compile_grammar(self._tokens, request["kind"], source)
            self._templates.add(tenant, key, matcher, len(source))
        else:
            self.num_hits += 1
        self.compile_s += time.thread_time() - start_s
        return matcher


class Rows:
    """The running sequences of a lane."""

    def __init__(self, tokens: Tokens, memory: WrittenMasks) -> None:
        self._tokens = tokens
        self._memory = memory
        self._rows: dict[int, Row] = {}
        self._compiler = Compiler(tokens)
        self._due: set[int] = set()
        self._spent_s: dict[str, float] = {}

    def take(self, work: Work) -> Written:
        """Takes sequences that open, tokens of others, and the ids of ended ones. Writes masks: as
        many as it computes in a moment. The next answers have the others."""
        start_s = time.process_time()
        written = Written()
        self._accept(work)
        for row_id, found in self._compiler.pop_done().items():
            row = self._rows.get(row_id)
            if row is None:
                continue
            if isinstance(found, Refused):
                self._end(row_id, written, found)
            else:
                row.matcher = found
        now_s = time.thread_time()
        end_s = now_s + ANSWER_SECONDS
        ready = self._in_order()
        for row_id in ready:
            now_s = self._advance(row_id, written, now_s, end_s)
            if now_s >= end_s:
                break
        written.has_more = not self._due.isdisjoint(ready)
        written.is_busy = self._compiler.is_busy
        written.stuck = self._compiler.stuck
        written.num_hits, self._compiler.num_hits = self._compiler.num_hits, 0
        written.compile_s, self._compiler.compile_s = self._compiler.compile_s, 0.0
        written.seconds = time.process_time() - start_s
        return written

    def _accept(self, work: Work) -> None:
        now_s = time.monotonic()
        for each in work.opens:
            self._rows[each["id"]] = Row(each["tenant"], each["slot"], each["tokens"])
            self._due.add(each["id"])
        for row_id, token in work.steps:
            row = self._rows.get(row_id)
            if row is not None:
                row.backlog.append(token)
                row.due_s = now_s
                self._due.add(row_id)
        # The last, since a row may open and end in one request.
        for row_id in work.closes:
            row = self._rows.pop(row_id, None)
            if row is not None:
                self._due.discard(row_id)
                self._compiler.discard(row_id, row.tenant)
        for each in work.opens:
            if each["id"] in self._rows:
                self._compiler.add(each)

    def _in_order(self) -> list[int]:
        """Returns the rows whose mask can be computed: tenants in turn, by the time that they take,
        so that none waits for all rows of another. In any order if one answer has time for all."""
        due = [(row_id, self._rows[row_id]) for row_id in self._due]
        ready = [(row_id, row) for row_id, row in due if row.matcher is not None]
        expected_s = [row.cost_s + TOKEN_SECONDS * len(row.backlog) for _, row in ready]
        if sum(expected_s) < ANSWER_SECONDS:
            self._spent_s.clear()
            return [row_id for row_id, _ in ready]
        of_tenant: dict[str, list[tuple[float, int]]] = {}
        for row_id, row in ready:
            of_tenant.setdefault(row.tenant, []).append((row.patience_s, row_id))
        # A tenant whose rows were all computed begins again with the one that spent the least.
        known = {tenant: self._spent_s[tenant] for tenant in of_tenant if tenant in self._spent_s}
        least_s = min(known.values(), default=0.0)
        self._spent_s = {tenant: known.get(tenant, least_s) - least_s for tenant in of_tenant}
        places: list[tuple[float, float, int]] = []
        for tenant, rows in of_tenant.items():
            before_s = self._spent_s[tenant]
            for patience_s, row_id in sorted(rows):
                places.append((before_s, patience_s, row_id))
                before_s += self._rows[row_id].cost_s
        return [row_id for _, _, row_id in sorted(places)]

    def _advance(self, row_id: int, written: Written, start_s: float, end_s: float) -> float:
        """Computes a row's mask, or takes as many of its tokens as there is time for. Returns the
        time afterwards."""
        row = self._rows[row_id]
        try:
            is_done = self._take_backlog(row, end_s)
            if is_done:
                self._memory.write(row.matcher, row.slot)
                check_matcher(row.matcher)
        except Refused as error:
            self._end(row_id, written, error)
            return time.thread_time()
        now_s = time.thread_time()
        cost_s = now_s - start_s
        self._spent_s[row.tenant] = self._spent_s.get(row.tenant, 0.0) + cost_s
        if not is_done:
            return now_s
        may_end = self._memory.pop_bit(row.slot, self._tokens.end)
        written.masks.append((row_id, row.num_tokens, may_end))
        self._due.discard(row_id)
        row.cost_s = cost_s
        if row.num_tokens:
            row.num_slow += cost_s > SLOW_STEP_SECONDS
            if cost_s > COSTLY_STEP_SECONDS or row.num_slow >= MAX_SLOW_STEPS:
                written.slow.append(row_id)
        return now_s

    def _take_backlog(self, row: Row, end_s: float) -> bool:
        """Returns whether all of a row's tokens were taken in time: some are in any case."""
        while row.backlog:
            some = row.backlog[:SLICE_TOKENS]
            if not row.matcher.consume_tokens(some):
                check_matcher(row.matcher)
            del row.backlog[: len(some)]
            row.num_tokens += len(some)
            if row.backlog and time.thread_time() >= end_s:
                return False
        return True

    def _end(self, row_id: int, written: Written, error: Refused) -> None:
        # Some quote the grammar, and one answer has the errors of many rows.
        written.errors.append((row_id, str(error)[:MAX_ERROR_CHARS]))
        del self._rows[row_id]
        self._due.discard(row_id)
