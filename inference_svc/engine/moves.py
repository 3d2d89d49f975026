"""Requests that follow their adapter's name to newer versions, at the border of a step.

Until a version can be used, its requests go on with the one before: a load delays nobody.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from inference_svc.core import Sequence, SequenceState
from inference_svc.engine.messages import Move
from inference_svc.engine.scheduler import Scheduler


@dataclass
class Moves:
    """The sequences that are to move, by request id, each a waiter for the version that it moves
    to."""

    scheduler: Scheduler
    _pending: dict[str, tuple[Sequence, Move]] = field(default_factory=dict)

    def add(self, sequence: Sequence, move: Move, now_s: float) -> None:
        """Replaces where a sequence was to move before."""
        self.discard(sequence)
        if move.digest != sequence.request.digest:
            self.scheduler.adapters.add_waiter(move.digest, now_s, count=False)
            self._pending[move.request_id] = sequence, move

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence, which ends."""
        found = self._pending.pop(sequence.request.request_id, None)
        if found is not None:
            self.scheduler.adapters.remove_waiter(found[1].digest)

    def apply(self, now_s: float) -> None:
        """Moves what can move; called between two steps."""
        for sequence, move in list(self._pending.values()):
            if _is_being_scored(sequence):
                continue  # of one version, in one piece
            is_ready = self.scheduler.is_schedulable(move.digest)
            # One that waits for its version may as well wait for the newer one.
            is_idle = sequence.state is SequenceState.WAITING and not self.scheduler.is_schedulable(
                sequence.request.digest
            )
            if is_ready or is_idle:
                self._move(sequence, move, now_s)

    def rescue(self, digest: str, now_s: float) -> None:
        """Moves sequences whose version cannot be loaded; those that were to move to it stay where
        they are."""
        for sequence, move in list(self._pending.values()):
            if move.digest == digest:
                self.discard(sequence)
            elif (
                sequence.request.digest == digest
                and sequence.state is SequenceState.WAITING
                and not _is_being_scored(sequence)
            ):
                self._move(sequence, move, now_s)

    def _move(self, sequence: Sequence, move: Move, now_s: float) -> None:
        del self._pending[move.request_id]
        self.scheduler.move(sequence, move.adapter, move.digest, now_s)

    @property
    def waiters(self) -> Counter[str]:
        """How many sequences wait to move to each version."""
        return Counter(move.digest for _, move in self._pending.values())

    def check_integrity(self) -> None:
        """Asserts that only sequences of the engine are to move, to other versions than theirs."""
        for request_id, (sequence, move) in self._pending.items():
            assert sequence.request.request_id == request_id == move.request_id
            assert sequence.state is not SequenceState.FINISHED
            assert move.digest != sequence.request.digest


def _is_being_scored(sequence: Sequence) -> bool:
    """Whether the log probabilities of a part of the prompt have been returned."""
    return 1 < sequence.num_scored < sequence.num_prompt
