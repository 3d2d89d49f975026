"""Decides which sequences run in the next step, within tokens, room for state and adapters.

Plain Python over plain data; no tensors, no I/O. A sequence whose adapter is not resident never
delays another.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from inference_svc.core import (
    BASE_SLOT,
    AdapterKey,
    AdapterVersion,
    Batch,
    BatchRow,
    Digest,
    Sequence,
    SequenceState,
    VersionPolicy,
)
from inference_svc.engine.policy.fair_queue import FairQueue
from inference_svc.engine.policy.memory_backoff import StepLimit
from inference_svc.engine.policy.pictures.memory import PictureMemory
from inference_svc.engine.policy.preemption import Places, last_of_largest
from inference_svc.engine.policy.prices import FREE, Prices
from inference_svc.engine.policy.siblings import Siblings
from inference_svc.engine.policy.states.states import States
from inference_svc.engine.policy.step_budget import Grants, Turns, share_step
from inference_svc.engine.policy.throughput import PrefixMissRatio
from inference_svc.grammars.grammar import Grammar
from inference_svc.pictures.prompt import NO_WORK


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_tokens` per step, at least `max_sequences`; `max_prefill_chunk` per sequence and
    step; `fair_quantum` tokens per round of a tenant or an adapter; `fair_ageing_s`: how long later
    requests may overtake one without bound, by priority, by their adapter's round or because their
    adapter is resident. If it `computes_whole` prompts, none is cut: it starts in a step that has
    room for all of it, which is its only one."""

    max_sequences: int
    max_batch_tokens: int
    max_prefill_chunk: int
    fair_quantum: int = 1024
    fair_ageing_s: float = 2.0
    computes_whole: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.max_sequences <= self.max_batch_tokens
        assert self.max_prefill_chunk > 0
        assert self.fair_quantum > 0


class Hold(enum.Enum):
    """The sequences that do not run: nothing is held, no sequence that has not been computed before
    starts, or none is computed."""

    NOTHING = "nothing"
    STARTS = "starts"
    EVERYTHING = "everything"


class AdapterView(Protocol):
    """The part of residency that the scheduler uses."""

    def add_waiter(self, key: AdapterKey, now_s: float, count: bool = True) -> None: ...
    def remove_waiter(self, key: AdapterKey, *, expired: bool = False) -> None: ...
    def ensure_loading(self, key: AdapterKey, now_s: float) -> None: ...
    def trace_load(self, key: AdapterKey, asker: Any, now_s: float) -> Any: ...
    def is_schedulable(self, key: AdapterKey) -> bool: ...
    def acquire(self, key: AdapterKey) -> int: ...
    def release(self, key: AdapterKey) -> None: ...
    def pop_ready(self) -> list[AdapterKey]: ...
    def pop_changes(self) -> tuple[Any, ...]: ...


class MaskView(Protocol):
    """The part of `grammars.masks.Masks` that the scheduler uses."""

    def open(self, request_id: str, grammar: Grammar, tenant: str, tokens: list[int]) -> Any: ...
    def close_row(self, row: Any) -> None: ...
    def num_computable(self, row: Any, num_tokens: int, num_left: int) -> int: ...


def _rank(sequence: Sequence) -> tuple[int, int, float]:
    """Orders running sequences: the last is preempted first."""
    request = sequence.request
    return not sequence.is_aged, 0 if sequence.is_aged else -request.priority, request.arrival_s


@dataclass
class Scheduler:
    """`running` is in order of rank; all others are in `queue`, parked if their adapter is not
    resident, or held among `siblings`. `is_short`: in the last step there was no room to start
    another sequence. `num_moves` counts moves to newer versions. The runner lowers `step_limit`
    where the device's memory does not suffice for the plan. `masks` has those of sequences with
    grammars, and `pictures` the embeddings of pictures, if the model reads any. `num_pooling` of
    the running sequences pool their prompts."""

    limits: Limits
    states: States
    adapters: AdapterView
    prices: Prices = FREE
    masks: MaskView | None = None
    pictures: PictureMemory | None = None
    queue: FairQueue = field(init=False)
    places: Places = field(init=False)
    step_limit: StepLimit = field(init=False)
    siblings: Siblings = field(default_factory=Siblings)
    running: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0
    num_moves: int = 0
    num_pooling: int = 0
    is_short: bool = False
    hold: Hold = Hold.NOTHING
    _turns: Turns = field(default_factory=Turns)
    prefix_miss_ratio: PrefixMissRatio = field(default_factory=PrefixMissRatio)

    def __post_init__(self) -> None:
        limits = self.limits
        self.queue = FairQueue(limits.fair_quantum, limits.fair_ageing_s, self.prices)
        self.places = Places(limits.max_sequences, self.states)
        whole = limits.computes_whole
        self.step_limit = StepLimit(limits.max_batch_tokens, limits.max_sequences, whole)

    # Adding and removing sequences.

    @property
    def num_free(self) -> int:
        """The number of sequences that `max_sequences` still allows to run."""
        return self.limits.max_sequences - len(self.running)

    @property
    def has_started(self) -> bool:
        """Whether a sequence runs, or did and waits to be computed anew."""
        return bool(self.running) or any(each.started_s is not None for each in self.queue)

    @property
    def num_open(self) -> int:
        """The number of sequences that run or wait."""
        return len(self.running) + len(self.queue) + self.siblings.num_held

    def is_schedulable(self, key: AdapterKey) -> bool:
        """Whether a sequence of this adapter, "" for none, may start."""
        return not key or self.adapters.is_schedulable(key)

    def add(self, sequence: Sequence, now_s: float) -> None:
        # Without a prefix cache each has to compute the prompt itself.
        if not (self.states.caching and self.siblings.holds(sequence)):
            self._add(sequence, now_s)

    def _add(self, sequence: Sequence, now_s: float) -> None:
        key = sequence.request.key
        if key:
            sequence.adapter_wanted_s = now_s
            self.adapters.add_waiter(key, now_s)
        self._enqueue(sequence, now_s)

    def _enqueue(self, sequence: Sequence, now_s: float) -> None:
        self.queue.add(sequence)
        if sequence.request.key:
            self._refresh(sequence.request.key, now_s)
            request = sequence.request
            if request.trace is not None:
                load = self.adapters.trace_load(request.key, request.trace, now_s)
                sequence.load_trace = load or sequence.load_trace
            if not self.queue.is_parked(sequence.request.key):
                _note_ready(sequence, now_s)

    def _refresh(self, key: AdapterKey, now_s: float) -> None:
        """Parks or unparks the sequences of this adapter by whether it is schedulable."""
        if self.adapters.is_schedulable(key):
            if self.queue.is_parked(key):
                self.queue.unpark(key)
                for sequence in self.queue.of_key(key):
                    _note_ready(sequence, now_s)
        elif self.queue.has(key):
            self.adapters.ensure_loading(key, now_s)
            if not self.queue.is_parked(key):
                self.queue.park(key)

    def remove(self, sequence: Sequence, *, expired: bool = False) -> None:
        """Removes a sequence from the queue or the running ones and releases all that it holds."""
        if self.siblings.remove(sequence):
            _finish(sequence)
            return
        key = sequence.request.key
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.queue.remove(sequence)
            if key:
                self.adapters.remove_waiter(key, expired=expired)
        self.queue.ended(sequence)
        _finish(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.states.release(sequence)
        if sequence.masked is not None:
            assert self.masks is not None
            self.masks.close_row(sequence.masked)
            sequence.masked = None
        if sequence.request.pictures:
            assert self.pictures is not None
            self.pictures.release(sequence)
        if sequence.request.key:
            self.adapters.release(sequence.request.key)
        sequence.slot = BASE_SLOT
        self.num_pooling -= sequence.end_pooled > 0

    # One step.

    def schedule(self, now_s: float) -> Batch | None:
        """Returns the next step's work, or None when there is none.

        Generated tokens first; prompts share the rest of the token budget. When room runs out, the
        last in rank of the tenant that has most is preempted. Residency changes also while starts
        are held.
        """
        for key in self.adapters.pop_ready():
            self._refresh(key, now_s)
        for sequence in self.siblings.pop_free():
            self._add(sequence, now_s)
        if self.pictures is not None:
            self.pictures.begin([] if self.hold is Hold.EVERYTHING else self.running)
        rows: list[BatchRow] = []
        if self.hold is not Hold.EVERYTHING:
            rows = self._rows(now_s)
            if not rows and any(each.num_at_once for each in self.running):
                rows = self._rows(now_s)  # one that has started has room for all of them now
        if self.num_pooling:
            rows = list(map(_unsampled, rows))
        changes = self.adapters.pop_changes()
        pictures = NO_WORK
        if self.pictures is not None:
            pictures = self.pictures.pop_work()
            for sequence, cost in self.pictures.pop_costs():
                self.queue.charge(sequence, cost)
        if not (rows or changes or any(pictures)):
            return None
        rows.sort(key=_place)
        return Batch(tuple(rows), changes, self.num_pooling > 0, pictures)

    def _rows(self, now_s: float) -> list[BatchRow]:
        may_admit = self._start_claimed(now_s)
        num_preemptions = self.num_preemptions
        can_start = self.num_free > 0 and not self.is_short
        waiting = self.queue.ready_tokens if can_start else 0
        chunk = self.limits.max_prefill_chunk
        budget = self._max_tokens
        grants = share_step(self.running, budget, chunk, waiting, self.prices, self._turns)
        grants.computes_whole = self.limits.computes_whole
        rows: list[BatchRow] = []
        for sequence in list(self.running):
            num_tokens = grants.of(sequence)
            if not num_tokens or sequence.state is not SequenceState.RUNNING:
                continue  # preempted in this loop, for one before it
            if sequence.masked is not None or sequence.request.pictures:
                num_tokens = self._computable(sequence, num_tokens)
                if not num_tokens:
                    continue  # its mask is late, or its picture
            end = sequence.num_computed + num_tokens
            if end <= sequence.num_reserved or self._allocate(sequence, end, now_s):
                rows.append(_row(sequence, num_tokens))
        if num_preemptions == self.num_preemptions:
            if may_admit:
                self._admit(rows, grants, now_s)
            return rows
        return [row for row in rows if row.sequence.state is SequenceState.RUNNING]

    def _computable(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns how many of its next tokens a sequence may have computed whose mask, or picture,
        may be late."""
        if sequence.masked is not None:
            assert self.masks is not None
            left = sequence.num_uncomputed
            num_tokens = self.masks.num_computable(sequence.masked, num_tokens, left)
        if sequence.request.pictures:
            assert self.pictures is not None
            num_tokens = self.pictures.num_computable(sequence, num_tokens)
        return num_tokens

    def _start_claimed(self, now_s: float) -> bool:
        """Makes room for tenants that have less than their part, and wait, and starts the sequences
        that they claim at once, with all their state: else the others' growth would take the room.
        Returns False if there is no room all the same."""
        is_full = self.num_free == 0 or self.is_short
        if not is_full or not self.queue.num_ready or self.hold is not Hold.NOTHING:
            return True
        claims = self.places.claims(self.running, self.queue, now_s)
        for victim in claims.victims:
            self.preempt(victim, now_s)
        for sequence in claims.sequences:
            key = sequence.request.key
            if not self.is_schedulable(key):  # it has begun to drain
                self._refresh(key, now_s)
            elif self._start(sequence, now_s):
                has_room = self.states.allocate(sequence, len(sequence.token_ids))
                assert has_room, "it has started"
            else:
                self.is_short = True
                return False
        return True

    @property
    def _max_tokens(self) -> int:
        """The tokens of a step: every sequence that decodes gets one."""
        return max(self.step_limit.tokens, self.limits.max_sequences)

    def _allocate(self, sequence: Sequence, num_tokens: int, now_s: float) -> bool:
        """Makes room for the first `num_tokens` of a running sequence, preempting others. Returns
        False if it had to preempt the sequence itself."""
        while not self.states.allocate(sequence, num_tokens):
            victim = last_of_largest(self.running, sequence)
            self.preempt(victim, now_s)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence, now_s: float) -> None:
        """Requeues a sequence, to be recomputed; the prefix cache may keep its state."""
        self._stop(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if sequence.request.key:
            self.adapters.add_waiter(sequence.request.key, now_s, count=False)
        self._enqueue(sequence, now_s)

    def _stop(self, sequence: Sequence) -> None:
        """Takes a sequence from the running ones, so that it must be computed anew."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.has_sampled = False
        sequence.state = SequenceState.WAITING
        if sequence.version is not None and sequence.num_kept:
            sequence.num_kept = 0
            sequence.version = sequence.version._replace(num_kept=0)

    def preempt_all(self, now_s: float) -> None:
        """Requeues running sequences, and forgets all prefixes: their state will be lost."""
        while self.running:
            self.preempt(self.running[-1], now_s)
        self.states.forget_prefixes()
        if self.pictures is not None:
            self.pictures.forget()

    def move(self, sequence: Sequence, label: str, digest: Digest, now_s: float) -> None:
        """Moves a sequence to another version of its adapter, for which it has been a waiter. A
        running one must find it resident; unless it keeps its state, it waits to be computed anew.
        State is kept that has led to a token, which says whose it is."""
        policy = sequence.request.version_policy
        is_running = sequence.state is SequenceState.RUNNING
        keeps = policy is VersionPolicy.FOLLOW_KEEP and is_running and sequence.has_sampled
        old_key, is_held = sequence.request.key, self.siblings.is_held(sequence)
        request = replace(sequence.request, key=digest, names=(label,))
        if keeps:
            slot = self.adapters.acquire(digest)
            self.adapters.release(old_key)
            sequence.slot, sequence.num_kept = slot, sequence.num_computed
        elif is_running:
            self._stop(sequence)
        elif is_held:
            self.adapters.remove_waiter(digest)  # it waits for no adapter before it is queued
        else:
            self.queue.remove(sequence)
            self.adapters.remove_waiter(old_key)
        sequence.request, sequence.prefix_keys = request, []
        sequence.version = AdapterVersion(label, digest, sequence.num_kept)
        self.num_moves += 1
        if not (keeps or is_held):
            self._enqueue(sequence, now_s)

    def _admit(self, rows: list[BatchRow], grants: Grants, now_s: float) -> None:
        """Starts waiting sequences in order of service."""
        self.is_short = False
        while self.num_free > 0 and grants.left >= 1:
            sequence = self._next(now_s)
            if sequence is None or (rows and _must_wait(sequence, grants)):
                return
            key = sequence.request.key
            if not self.is_schedulable(key):  # it has begun to drain
                self._refresh(key, now_s)
                continue
            if not self._start(sequence, now_s):
                self.is_short = True
                return  # there is no room: the next in order must not be overtaken
            num_tokens = grants.start(sequence)
            if sequence.masked is not None or sequence.request.pictures:
                num_tokens = self._computable(sequence, num_tokens)
                if not num_tokens:
                    continue
            has_room = self.states.allocate(sequence, sequence.num_computed + num_tokens)
            assert has_room, "it has started"
            rows.append(_row(sequence, num_tokens))

    def _next(self, now_s: float) -> Sequence | None:
        """Returns the sequence to start next; while starts are held, a sequence that was computed
        before."""
        if self.hold is not Hold.STARTS:
            return self.queue.first(now_s)
        return next(
            (
                each
                for each in self.queue
                if each.started_s is not None and self.is_schedulable(each.request.key)
            ),
            None,
        )

    def _start(self, sequence: Sequence, now_s: float) -> bool:
        """Moves a sequence to the running ones, with its cached prefix, if there is room for its
        known tokens."""
        num_cached = self.states.start(sequence)
        if num_cached is None:
            return False
        num_uncached = sequence.num_uncomputed - num_cached
        self.prefix_miss_ratio.observe(sequence.num_uncomputed, num_uncached)
        self.queue.start(sequence, num_uncached)
        sequence.num_computed = num_cached
        if sequence.request.key:
            sequence.slot = self.adapters.acquire(sequence.request.key)
        sequence.state = SequenceState.RUNNING
        sequence.num_output_at_start = sequence.num_output
        request = sequence.request
        if request.grammar is not None and request.sampling.max_tokens:
            assert self.masks is not None, "a server with grammars has masks"
            output = sequence.token_ids[sequence.num_prompt :]
            sequence.masked = self.masks.open(
                request.request_id, request.grammar, request.tenant, output
            )
        self.places.started(sequence, now_s)
        sequence.is_aged = self.queue.is_aged(sequence, now_s)
        if sequence.started_s is None:
            sequence.started_s = now_s
            sequence.num_cached = sequence.num_computed
        bisect.insort(self.running, sequence, key=_rank)
        self.num_pooling += sequence.end_pooled > 0
        return True

    def check_integrity(self) -> None:
        """Asserts that queues, sequences and their state agree."""
        self.states.check_integrity(self.running)
        self.queue.check_integrity()
        if self.pictures is not None:
            self.pictures.check_integrity(self.running)
        self.siblings.check_integrity()
        assert self.running == sorted(self.running, key=_rank)
        assert self.num_pooling == sum(each.end_pooled > 0 for each in self.running)
        for sequence in self.queue:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.room
        for sequence in self.running:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.num_uncomputed > 0
            assert sequence.room >= sequence.num_computed


def _finish(sequence: Sequence) -> None:
    """Others may know the sequence until their next step, but not its pixels."""
    sequence.state = SequenceState.FINISHED
    if sequence.request.pictures:
        sequence.request = replace(sequence.request, pictures=())


def _note_ready(sequence: Sequence, now_s: float) -> None:
    if sequence.adapter_ready_s is None:
        sequence.adapter_ready_s = now_s


def _must_wait(sequence: Sequence, grants: Grants) -> bool:
    """Returns whether a prompt that may not be cut is to wait for a later step. It is asked of
    steps with others: a prompt that is too long for any, since memory has run out, is alone."""
    return grants.computes_whole and sequence.num_uncomputed > grants.left


def _place(row: BatchRow) -> int:
    """Orders a batch's rows: by slot, decodes first."""
    return 2 * row.sequence.slot + (row.num_tokens > 1 or not row.samples)


def _unsampled(row: BatchRow) -> BatchRow:
    """Returns a row as it is, or the one of a prompt that is pooled as one that never samples, so
    that a step with its last token alone is no step of generated tokens either."""
    return row._replace(samples=False) if row.samples and row.sequence.end_pooled else row


def _row(sequence: Sequence, num_tokens: int) -> BatchRow:
    samples = sequence.num_uncomputed == num_tokens
    return BatchRow(sequence, sequence.num_computed, num_tokens, samples)
