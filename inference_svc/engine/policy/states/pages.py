"""Keys and values of tokens, in pages: a kind of state that grows with its sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from inference_svc.core import Sequence
from inference_svc.engine.policy.states.pool import UnitPool


class Pages:
    """A `StateKind`: `num_pages` pages of `page_size` tokens. A full page that is computed may be
    shared; without `caching` none is."""

    name = "kv_pages"

    def __init__(self, num_pages: int, page_size: int, caching: bool = True) -> None:
        assert page_size > 0
        self.page_size = page_size
        self.pool = UnitPool(num_pages, caching)

    @property
    def num_held(self) -> int:
        return self.pool.num_used

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, keys: SequenceOf[bytes]) -> tuple[int, list[int]]:
        pages: list[int] = []
        for key in keys:
            page = self.pool.find(key)
            if page is None:
                break
            pages.append(page)
        return len(pages), pages

    def num_needed(self, sequence: Sequence, matched: SequenceOf[int]) -> int:
        """Returns how many free pages a sequence takes to start, and for all its known tokens, if
        it shares the ones that matched."""
        needed = self.pages_for(len(sequence.token_ids)) - len(matched)
        return needed + self.pool.num_free_among(matched)

    def share(self, sequence: Sequence, units: list[int]) -> None:
        self.pool.share(units)
        sequence.page_ids = units
        sequence.room = sequence.num_reserved = len(units) * self.page_size

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self.pages_for(num_tokens) - len(sequence.page_ids)
        if not self.pool.can_allocate(missing):
            return False
        sequence.page_ids += self.pool.allocate(missing)
        sequence.room = sequence.num_reserved = len(sequence.page_ids) * self.page_size
        return True

    def settle(self, sequence: Sequence, start: int) -> None:
        if not self.pool.caching or sequence.num_kept:
            return
        size = self.page_size
        for index in range(start // size, sequence.num_computed // size):
            self.pool.publish(sequence.page_ids[index], sequence.prefix_keys[index])

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.page_ids)
        sequence.page_ids, sequence.room, sequence.num_reserved = [], 0, 0

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        self.pool.check_integrity([each.page_ids for each in running])
        for each in running:
            assert each.room == len(each.page_ids) * self.page_size >= each.num_computed
            assert each.num_reserved <= each.room
