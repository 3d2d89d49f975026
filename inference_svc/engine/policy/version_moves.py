"""Requests that follow their adapter's name to newer versions, at the border of a step.

Until a version can be used, its requests go on with the one before: a load delays nobody. A
sequence that is computed anew for a version has generated NEW_TOKENS, and an eighth of its length,
before it is so for another: versions that come faster are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.core import Digest, Sequence, SequenceState, VersionPolicy
from inference_svc.engine.policy.scheduler import Scheduler
from inference_svc.engine.transport.messages import Move

NEW_TOKENS = 16
"""The tokens generated, at least, before a sequence is computed anew once more."""
ANEW_PER_NEW = 8
"""How many tokens may be computed anew for each generated one, of long sequences."""


@dataclass(slots=True)
class _Pending:
    """A sequence that is to move to `target`, for which it is a waiter, and then to `then`: a
    nearly loaded version is not given up for a newer one, but a version that is ready is."""

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
        if move.digest == sequence.request.key:
            self.discard(sequence)
        elif pending is None:
            self._wait_for(_Pending(sequence, move), now_s)
        else:
            pending.then = None if move.digest == pending.target.digest else move

    def _wait_for(self, pending: _Pending, now_s: float) -> None:
        self.scheduler.adapters.add_waiter(pending.target.digest, now_s, count=False)
        self._pending[pending.target.request_id] = pending

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence, which ends, or stays."""
        pending = self._pending.pop(sequence.request.request_id, None)
        if pending is not None:
            self.scheduler.adapters.remove_waiter(pending.target.digest)

    def apply(self, now_s: float) -> None:
        """Moves all sequences that can move; called between two steps."""
        for pending in list(self._pending.values()):
            digest = pending.target.digest
            if not self.scheduler.is_schedulable(digest):  # it may have been evicted meanwhile
                self.scheduler.adapters.ensure_loading(digest, now_s)
            elif _may_move(pending.sequence):
                self._move(pending, now_s)
            elif pending.then is not None:
                self.scheduler.adapters.remove_waiter(digest)
                self._wait_for(_Pending(pending.sequence, pending.then), now_s)

    def fail(self, digest: str, now_s: float) -> None:
        """Gives up a version that cannot be loaded, or, for the sequences that wait for it, moves
        to the next one at once."""
        for pending in list(self._pending.values()):
            sequence = pending.sequence
            if pending.target.digest == digest:
                self.discard(sequence)
                if pending.then is not None:
                    self.add(sequence, pending.then, now_s)
            elif (
                sequence.request.key == digest
                and sequence.state is SequenceState.WAITING
                and not _is_being_scored(sequence)
            ):
                self._move(pending, now_s)

    def _move(self, pending: _Pending, now_s: float) -> None:
        target, sequence = pending.target, pending.sequence
        del self._pending[target.request_id]
        self.scheduler.move(sequence, target.adapter, target.digest, now_s)
        sequence.may_move_at = sequence.num_output + new_tokens(sequence)
        if pending.then is not None:
            self.add(sequence, pending.then, now_s)

    @property
    def waited_for(self) -> list[Digest]:
        """The versions that sequences wait to move to, one for each sequence."""
        return [pending.target.digest for pending in self._pending.values()]

    def check_integrity(self) -> None:
        """Asserts that only sequences of the engine are to move, to other versions than theirs."""
        for request_id, pending in self._pending.items():
            assert pending.sequence.request.request_id == request_id == pending.target.request_id
            assert pending.sequence.state is not SequenceState.FINISHED
            assert pending.target.digest != pending.sequence.request.key


def new_tokens(sequence: Sequence) -> int:
    """Returns how many tokens a sequence generates between two times that it is computed anew."""
    return max(NEW_TOKENS, len(sequence.token_ids) // ANEW_PER_NEW)


def _may_move(sequence: Sequence) -> bool:
    """Whether a sequence may move to a version that is there. A waiting sequence loses nothing."""
    if _is_being_scored(sequence):
        return False
    policy, is_running = sequence.request.version_policy, sequence.state is SequenceState.RUNNING
    if not is_running or (policy is VersionPolicy.FOLLOW_KEEP and sequence.has_sampled):
        return True
    return sequence.num_output >= sequence.may_move_at


def _is_being_scored(sequence: Sequence) -> bool:
    """Whether the log probabilities of a part of the prompt have been returned."""
    return 1 < sequence.num_scored < sequence.num_prompt
