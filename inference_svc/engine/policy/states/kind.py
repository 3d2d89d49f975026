"""What a kind of state has to offer."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from inference_svc.core import Sequence
from inference_svc.engine.policy.states.pool import UnitPool


class StateKind(Protocol):
    """One kind of state: memory in units, some of which each running sequence holds, and shares
    with sequences that have an equal prefix."""

    name: str
    """Its place in reports of memory."""
    pool: UnitPool

    @property
    def num_held(self) -> int:
        """The number of units that sequences hold."""

    def match(self, keys: SequenceOf[bytes]) -> tuple[int, list[int]]:
        """Returns how many of a prefix's pages, with these keys, need not be computed, as far as
        this kind knows, and the units that a sequence shares then."""

    def share(self, sequence: Sequence, units: list[int]) -> None:
        """Gives a sequence that starts the units that `match` returned, and the first ones of its
        own."""

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the state of a running sequence's first `num_tokens`, which the next step
        may compute. Returns False, and changes nothing, if that takes more units than are free."""

    def settle(self, sequence: Sequence, start: int) -> None:
        """Publishes the state that a step has completed, which computed the tokens from `start` up
        to `sequence.num_computed`; the keys of the sequence's full pages are known."""

    def release(self, sequence: Sequence) -> None:
        """Takes all units from a running sequence."""

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        """Asserts that exactly these sequences hold units, each the ones that it needs."""
