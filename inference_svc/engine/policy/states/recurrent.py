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
    store states at borders: every `border_tokens`, and at the end of a prompt's last full page,
    each under the key of the page that ends there. A sequence whose prefix is known goes on from
    the last border that is still stored.
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
        self._max_borders = num_slots - 2 * max_sequences
        self._num_borders = 0  # held, by all sequences
        self.pool = UnitPool(num_slots + 1, caching)
        assert self.pool.allocate(1) == [EMPTY_STATE]

    @property
    def num_held(self) -> int:
        return self.pool.num_used - 1

    @property
    def num_slots(self) -> int:
        """The slots that sequences may hold."""
        return self.pool.num_units - 1

    @property
    def max_stored(self) -> int:
        """The slots that are stored ones' even if all sequences run."""
        return self._max_borders

    def match(self, keys: SequenceOf[bytes]) -> tuple[int, list[int]]:
        for num_pages in range(len(keys), 0, -1):
            slot = self.pool.find(keys[num_pages - 1])
            if slot is not None:
                return num_pages, [slot]
        return 0, [EMPTY_STATE]

    def share(self, sequence: Sequence, units: list[int]) -> None:
        self.pool.share(units)
        (sequence.state_read,) = units
        (sequence.state_written,) = self.pool.allocate(1)
        sequence.num_reserved = 0  # it has no slots for borders yet

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Takes a slot, too, for each border that the next step passes, as far as there are more
        than running sequences need. Never returns False."""
        if not self._stores(sequence):
            return True
        first = sequence.state_borders[-1][0] if sequence.state_borders else sequence.num_computed
        for border in self._borders(sequence, first, num_tokens):
            if self._num_borders == self._max_borders:
                break
            (slot,) = self.pool.allocate(1)
            sequence.state_borders.append((border, slot))
            self._num_borders += 1
        later = self._borders(sequence, num_tokens - 1, sequence.room)
        sequence.num_reserved = later[0] if later else sequence.room
        return True

    def _stores(self, sequence: Sequence) -> bool:
        return self.pool.caching and self._max_borders > 0 and not sequence.num_kept

    def _borders(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Returns the borders between these two, without them, in order."""
        size, last = self.border_tokens, self._last_page_end(sequence)
        found = {*range((start // size + 1) * size, end, size)}
        return sorted(found | {last} if start < last < end else found)

    def _last_page_end(self, sequence: Sequence) -> int:
        """Returns the end of the last full page of the prompt before its last token."""
        return (sequence.num_prompt - 1) // self._page_size * self._page_size

    def settle(self, sequence: Sequence, start: int) -> None:
        before, sequence.state_read = sequence.state_read, sequence.state_written
        if self._stores(sequence):
            self._publish(sequence)
        else:
            self._release_borders(sequence)
        if before != EMPTY_STATE and self.pool.is_private(before):
            sequence.state_written = before
        else:
            self.pool.release([before])
            (sequence.state_written,) = self.pool.allocate(1)

    def _publish(self, sequence: Sequence) -> None:
        """Stores the states at the borders that the step has passed, or has reached."""
        num_tokens, keys = sequence.num_computed, sequence.prefix_keys
        later = [each for each in sequence.state_borders if each[0] > num_tokens]
        for border, slot in sequence.state_borders:
            if border < num_tokens:
                self.pool.publish(slot, keys[border // self._page_size - 1])
            if border <= num_tokens:
                self._release_border(slot)
        sequence.state_borders = later
        is_border = num_tokens % self.border_tokens == 0
        if is_border or num_tokens == self._last_page_end(sequence):
            self.pool.publish(sequence.state_read, keys[num_tokens // self._page_size - 1])

    def _release_border(self, slot: int) -> None:
        self.pool.release([slot])
        self._num_borders -= 1

    def _release_borders(self, sequence: Sequence) -> None:
        for _, slot in sequence.state_borders:
            self._release_border(slot)
        sequence.state_borders = []

    def release(self, sequence: Sequence) -> None:
        self._release_borders(sequence)
        self.pool.release([sequence.state_read, sequence.state_written])
        sequence.state_read = sequence.state_written = EMPTY_STATE

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        borders = [[slot for _, slot in each.state_borders] for each in running]
        held = [[each.state_read, each.state_written] for each in running]
        self.pool.check_integrity([[EMPTY_STATE], *held, *borders])
        assert sum(map(len, borders)) == self._num_borders <= self._max_borders
        for each in running:
            assert self.pool.is_private(each.state_written), "a state that others may read"
            assert (each.state_read == EMPTY_STATE) <= (each.num_computed == 0)
            ends = [end for end, _ in each.state_borders]
            assert ends == sorted({*ends})
            assert all(each.num_computed < end < each.room for end in ends)
