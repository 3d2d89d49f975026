"""States of a fixed size, of mixers that fold all tokens before into one state."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from inference_svc.core import EMPTY_STATE, Sequence
from inference_svc.engine.policy.states.pool import UnitPool


class Recurrent:
    """A `StateKind`: `num_slots` slots of one sequence's state in all recurrent layers, numbered
    from 1; 0 is the state before the first token, which nothing changes.

    A step reads a sequence's state from one slot, and writes it to another, so that it can be
    computed again: a sequence holds two. `max_sequences` find theirs at any time. Further slots
    store states at borders, every `border_tokens`, each under the key of the page that ends there.
    So a row of a step ends at a border, and a sequence whose prefix is known continues from the
    last border that is still stored.
    """

    name = "recurrent_states"

    def __init__(
        self,
        num_slots: int,
        max_sequences: int,
        border_tokens: int,
        page_size: int,
        caching: bool = True,
    ) -> None:
        assert num_slots >= 2 * max_sequences > 0
        assert border_tokens > 0
        assert border_tokens % page_size == 0
        self.border_tokens = border_tokens
        self._page_size = page_size
        self.pool = UnitPool(num_slots + 1, caching)
        assert self.pool.allocate(1) == [EMPTY_STATE]

    @property
    def num_held(self) -> int:
        return self.pool.num_used - 1

    def match(self, keys: SequenceOf[bytes]) -> tuple[int, list[int]]:
        step = self.border_tokens // self._page_size
        for num_pages in range(len(keys) // step * step, 0, -step):
            slot = self.pool.find(keys[num_pages - 1])
            if slot is not None:
                return num_pages, [slot]
        return 0, [EMPTY_STATE]

    def share(self, sequence: Sequence, units: list[int]) -> None:
        self.pool.share(units)
        (sequence.state_read,) = units
        (sequence.state_written,) = self.pool.allocate(1)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        return True

    def cut(self, sequence: Sequence, num_tokens: int) -> int:
        if not self.pool.caching or sequence.num_kept:
            return num_tokens
        return min(num_tokens, self.border_tokens - sequence.num_computed % self.border_tokens)

    def settle(self, sequence: Sequence, start: int) -> None:
        before, sequence.state_read = sequence.state_read, sequence.state_written
        num_tokens = sequence.num_computed
        if self.pool.caching and not sequence.num_kept and num_tokens % self.border_tokens == 0:
            key = sequence.prefix_keys[num_tokens // self._page_size - 1]
            self.pool.publish(sequence.state_read, key)
        if before != EMPTY_STATE and self.pool.is_private(before):
            sequence.state_written = before
        else:
            self.pool.release([before])
            (sequence.state_written,) = self.pool.allocate(1)

    def release(self, sequence: Sequence) -> None:
        self.pool.release([sequence.state_read, sequence.state_written])
        sequence.state_read = sequence.state_written = EMPTY_STATE

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        held = [[each.state_read, each.state_written] for each in running]
        self.pool.check_integrity([[EMPTY_STATE], *held])
        for each in running:
            assert self.pool.is_private(each.state_written), "a state that others may read"
            assert (each.state_read == EMPTY_STATE) <= (each.num_computed == 0)
