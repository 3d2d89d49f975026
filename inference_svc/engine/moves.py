"""Requests that follow their adapter's name to newer versions, at the border of a step.

Until a version can be used, its requests go on with the one before: a load delays nobody.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from inference_svc.core import Sequence, SequenceState
from inference_svc.engine.messages import Move
from inference_svc.engine.scheduler import Scheduler


@dataclass(slots=True)
class _Pending:
    """A sequence that is to move to `target`, for which it is a waiter, and then to `then`: what is
    nearly loaded is not given up for what has come since."""

    sequence: Sequence
    target: Move
    then: Move | None = None


@dataclass
class Moves:
    """The sequences that are to move, by request id."""

    scheduler: Scheduler
    _pending: dict[str, _Pending] = field(default_factory=dict)

    def add(self, sequence: Sequence, move: Move, now_s: float) -> None:
        """Replaces where a sequence was to move to last."""
        pending = self._pending.get(move.request_id)
        if move.digest == sequence.request.digest:
            self.discard(sequence)
        elif pending is None:
            self.scheduler.adapters.add_waiter(move.digest, now_s, count=False)
            self._pending[move.request_id] = _Pending(sequence, move)
        else:
            pending.then = None if move.digest == pending.target.digest else move

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence, which ends, or stays."""
        pending = self._pending.pop(sequence.request.request_id, None)
        if pending is not None:
            self.scheduler.adapters.remove_waiter(pending.target.digest)

    def apply(self, now_s: float) -> None:
        """Moves what can move; called between two steps."""
        for pending in list(self._pending.values()):
            digest = pending.target.digest
            if self.scheduler.is_schedulable(digest) and not _is_being_scored(pending.sequence):
                self._move(pending, now_s)
            else:  # it may have been evicted meanwhile
                self.scheduler.adapters.ensure_loading(digest, now_s)

    def fail(self, digest: str, now_s: float) -> None:
        """Gives up a version that cannot be loaded, or, for those that wait for it, moves to the
        next one at once."""
        for pending in list(self._pending.values()):
            sequence = pending.sequence
            if pending.target.digest == digest:
                self.discard(sequence)
                if pending.then is not None:
                    self.add(sequence, pending.then, now_s)
            elif (
                sequence.request.digest == digest
                and sequence.state is SequenceState.WAITING
                and not _is_being_scored(sequence)
            ):
                self._move(pending, now_s)

    def _move(self, pending: _Pending, now_s: float) -> None:
        target, sequence = pending.target, pending.sequence
        del self._pending[target.request_id]
        self.scheduler.move(sequence, target.adapter, target.digest, now_s)
        if pending.then is not None:
            self.add(sequence, pending.then, now_s)

    @property
    def waiters(self) -> Counter[str]:
        """How many sequences wait to move to each version."""
        return Counter(pending.target.digest for pending in self._pending.values())

    def check_integrity(self) -> None:
        """Asserts that only sequences of the engine are to move, to other versions than theirs."""
        for request_id, pending in self._pending.items():
            assert pending.sequence.request.request_id == request_id == pending.target.request_id
            assert pending.sequence.state is not SequenceState.FINISHED
            assert pending.target.digest != pending.sequence.request.digest


def _is_being_scored(sequence: Sequence) -> bool:
    """Whether the log probabilities of a part of the prompt have been returned."""
    return 1 < sequence.num_scored < sequence.num_prompt
