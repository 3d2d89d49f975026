"""Decides who runs in the next step: within tokens, pages, and the adapters that are resident.

Plain Python over plain data; no tensors, no I/O. A sequence whose adapter is not resident never
holds up another.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference_svc.core import BASE_SLOT, Batch, BatchRow, Sequence, SequenceState
from inference_svc.engine.pages import PagePool, page_key, root_key


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_tokens` per step, at least `max_sequences`; `max_prefill_chunk` per sequence and
    step; `max_overtake_s`: how long requests for resident adapters may pass one that waits for
    memory."""

    max_sequences: int
    max_batch_tokens: int
    max_prefill_chunk: int
    max_overtake_s: float = 2.0

    def __post_init__(self) -> None:
        assert 0 < self.max_sequences <= self.max_batch_tokens
        assert self.max_prefill_chunk > 0


class AdapterView(Protocol):
    """What the scheduler needs of residency."""

    def want(self, digest: str, now_s: float, count: bool = True) -> None: ...
    def unwant(self, digest: str, *, expired: bool = False) -> None: ...
    def ensure(self, digest: str, now_s: float) -> None: ...
    def can_run(self, digest: str) -> bool: ...
    def acquire(self, digest: str) -> int: ...
    def release(self, digest: str) -> None: ...
    def room_waits(self) -> dict[str, float]: ...
    def take_ready(self) -> list[str]: ...
    def take_changes(self) -> tuple[Any, ...]: ...


def _order(sequence: Sequence) -> tuple[int, float]:
    """Higher priority first, then first come; a preempted sequence keeps its place."""
    return -sequence.request.priority, sequence.request.arrival_s


@dataclass
class Scheduler:
    """All queues are in order of service. `waiting` may run as far as adapters go; `parked` wait
    for an adapter that is not resident, by digest, and cost a step nothing."""

    limits: Limits
    pages: PagePool
    adapters: AdapterView
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    parked: dict[str, list[Sequence]] = field(default_factory=dict)
    num_preemptions: int = 0

    # Sequences come and go.

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.num_parked

    @property
    def num_parked(self) -> int:
        return sum(map(len, self.parked.values()))

    @property
    def num_places(self) -> int:
        """How many more could run, for all that sequences say."""
        return self.limits.max_sequences - len(self.running)

    def all_waiting(self) -> list[Sequence]:
        """Waiting and parked, in order of service."""
        parked = [sequence for queue in self.parked.values() for sequence in queue]
        return sorted(self.waiting + parked, key=_order)

    def queue_order(self) -> list[str]:
        """The digests that sequences wait for, each at its first waiter's place."""
        return list(dict.fromkeys(s.request.digest for s in self.all_waiting() if s.request.digest))

    def add(self, sequence: Sequence, now_s: float) -> None:
        digest = sequence.request.digest
        if digest:
            sequence.adapter_wanted_s = now_s
            self.adapters.want(digest, now_s)
        self._enqueue(sequence, now_s)

    def _enqueue(self, sequence: Sequence, now_s: float) -> None:
        digest = sequence.request.digest
        if digest and not self.adapters.can_run(digest):
            self.adapters.ensure(digest, now_s)
            bisect.insort(self.parked.setdefault(digest, []), sequence, key=_order)
            return
        if digest and sequence.adapter_ready_s is None:
            sequence.adapter_ready_s = now_s
        bisect.insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence, *, expired: bool = False) -> None:
        """Takes a sequence out of its queue and gives back all that it holds."""
        digest = sequence.request.digest
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self._dequeue(sequence)
            if digest:
                self.adapters.unwant(digest, expired=expired)
        sequence.state = SequenceState.FINISHED

    def _dequeue(self, sequence: Sequence) -> None:
        digest = sequence.request.digest
        queue = self.parked.get(digest, [])
        if sequence not in queue:
            self.waiting.remove(sequence)
            return
        queue.remove(sequence)
        if not queue:
            del self.parked[digest]

    def _unpark(self, now_s: float) -> None:
        for digest in self.adapters.take_ready():
            for sequence in self.parked.pop(digest, []):
                self._enqueue(sequence, now_s)

    def _give_back(self, sequence: Sequence) -> None:
        self.pages.release(sequence.page_ids)
        sequence.page_ids = []
        if sequence.request.digest:
            self.adapters.release(sequence.request.digest)
        sequence.slot = BASE_SLOT

    # One step.

    def schedule(self, now_s: float) -> Batch | None:
        """The next step's work, or None when there is none.

        Decodes always run; prefills share what is left of the token budget, those that run before
        those that wait. When pages run out, the last in order of service is preempted.
        """
        self._unpark(now_s)
        budget = self.limits.max_batch_tokens - sum(s.num_uncomputed == 1 for s in self.running)
        rows: list[BatchRow] = []
        num_preemptions = self.num_preemptions
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted just now for one before it
            is_decode = sequence.num_uncomputed == 1
            num_tokens = 1 if is_decode else self._chunk(sequence, budget)
            if num_tokens and self._make_room(sequence, num_tokens, now_s):
                rows.append(_row(sequence, num_tokens))
                budget -= 0 if is_decode else num_tokens
        if num_preemptions == self.num_preemptions:
            self._admit(rows, budget, now_s)
        changes = self.adapters.take_changes()
        if not rows and not changes:
            return None
        rows.sort(key=lambda row: (row.slot, not row.is_decode))
        return Batch(tuple(rows), changes)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_uncomputed, budget, self.limits.max_prefill_chunk)

    def _make_room(self, sequence: Sequence, num_tokens: int, now_s: float) -> bool:
        """Pages for the next `num_tokens` of a running sequence, preempting others or itself."""
        needed = self.pages.pages_for(sequence.num_computed + num_tokens) - len(sequence.page_ids)
        while not self.pages.can_allocate(needed):
            victim = self.running[-1]
            self._preempt(victim, now_s)
            if victim is sequence:
                return False
        sequence.page_ids += self.pages.allocate(needed)
        return True

    def _preempt(self, sequence: Sequence, now_s: float) -> None:
        """Back to waiting, to be recomputed; its pages stay known to the prefix cache."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if sequence.request.digest:
            self.adapters.want(sequence.request.digest, now_s, count=False)
        self._enqueue(sequence, now_s)

    def _admit(self, rows: list[BatchRow], budget: int, now_s: float) -> None:
        """Starts waiting sequences in order of service."""
        held_after = self._held_after(now_s)
        for sequence in list(self.waiting):
            if len(self.running) >= self.limits.max_sequences or budget <= 0:
                return
            digest = sequence.request.digest
            if digest and not self.adapters.can_run(digest):  # evicted, or draining
                self.waiting.remove(sequence)
                self._enqueue(sequence, now_s)
                continue
            if digest and held_after is not None and _order(sequence) > held_after:
                continue
            if not self._start(sequence, now_s):
                return  # pages are short: whoever is next in order must not be passed
            num_tokens = self._chunk(sequence, budget)
            sequence.page_ids += self.pages.allocate(
                self.pages.pages_for(sequence.num_computed + num_tokens) - len(sequence.page_ids)
            )
            rows.append(_row(sequence, num_tokens))
            budget -= num_tokens

    def _held_after(self, now_s: float) -> tuple[int, float] | None:
        """The place of the first sequence whose adapter has waited for memory too long: those with
        adapters behind it must wait, so that what they would hold on to is given up."""
        overdue_s = now_s - self.limits.max_overtake_s
        places = [
            _order(self.parked[digest][0])
            for digest, since_s in self.adapters.room_waits().items()
            if since_s < overdue_s and digest in self.parked
        ]
        return min(places, default=None)

    def _start(self, sequence: Sequence, now_s: float) -> bool:
        """Moves to running with its cached prefix, if its known tokens fit the free pages."""
        cached = self.pages.match(self._prefix_keys(sequence))
        needed = self.pages.pages_for(len(sequence.token_ids)) - len(cached)
        if not self.pages.can_allocate(needed + self.pages.num_free_among(cached)):
            return False
        self.waiting.remove(sequence)
        self.pages.share(cached)
        sequence.page_ids = cached
        sequence.num_computed = len(cached) * self.pages.page_size
        if sequence.request.digest:
            sequence.slot = self.adapters.acquire(sequence.request.digest)
        sequence.state = SequenceState.RUNNING
        if sequence.started_s is None:
            sequence.started_s = now_s
            sequence.num_cached = sequence.num_computed
        bisect.insort(self.running, sequence, key=_order)
        return True

    def _prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the full pages of its known tokens, less the last token: it must be computed
        for there to be logits."""
        size = self.pages.page_size
        full = (len(sequence.token_ids) - 1) // size
        extend_page_keys(sequence, full, size)
        return sequence.page_hashes[:full]

    def check_integrity(self) -> None:
        """Asserts that queues, pages and states agree."""
        self.pages.check_integrity([s.page_ids for s in self.running])
        assert self.waiting == sorted(self.waiting, key=_order)
        for digest, queue in self.parked.items():
            assert queue == sorted(queue, key=_order)
            assert queue, "an empty queue"
            assert all(sequence.request.digest == digest for sequence in queue)
        for sequence in self.all_waiting():
            assert sequence.state is SequenceState.WAITING
            assert not sequence.page_ids
        for sequence in self.running:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.num_uncomputed > 0
            assert len(sequence.page_ids) >= self.pages.pages_for(sequence.num_computed)


def extend_page_keys(sequence: Sequence, num_pages: int, page_size: int) -> None:
    """Makes `sequence.page_hashes` cover its first `num_pages` full pages."""
    keys = sequence.page_hashes
    while len(keys) < num_pages:
        request = sequence.request
        parent = keys[-1] if keys else root_key(request.digest, request.cache_seed)
        start = len(keys) * page_size
        keys.append(page_key(parent, sequence.token_ids[start : start + page_size]))


def _row(sequence: Sequence, num_tokens: int) -> BatchRow:
    samples = sequence.num_uncomputed == num_tokens
    return BatchRow(sequence, sequence.num_computed, num_tokens, samples)
