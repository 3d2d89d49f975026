"""The state of sequences, of both kinds as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from inference_svc.core import Sequence
from inference_svc.engine.policy.states.kind import StateKind
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.prefix import extend_page_keys, known_keys
from inference_svc.engine.policy.states.recurrent import Recurrent

NEVER = sys.maxsize


class Prefix(NamedTuple):
    """The first tokens of a sequence whose state is known, and the units of each kind that hold it.
    `num_pages_only` tokens behind them have known pages, but no recurrent state."""

    num_tokens: int
    pages: list[int]
    slots: list[int]
    num_pages_only: int = 0


class States:
    """The state of all sequences: pages and, of a model with such mixers, recurrent states.

    Room is counted in tokens, as pages have it: recurrent states always have room for as many
    sequences as may run. A running sequence has `num_reserved` tokens of it.
    """

    def __init__(self, pages: Pages, recurrent: Recurrent | None = None) -> None:
        self.pages = pages
        self.recurrent = recurrent
        self.kinds: tuple[StateKind, ...] = (pages,)
        self.num_recomputed = 0
        """Tokens with known pages that sequences computed again, since no recurrent state was
        stored behind them."""
        if recurrent is not None:
            self.kinds += (recurrent,)

    @property
    def caching(self) -> bool:
        """Whether sequences share the state of equal prefixes."""
        return self.pages.pool.caching

    @property
    def room(self) -> int:
        """The tokens that there is room for."""
        return self.pages.pool.num_units * self.pages.page_size

    @property
    def free_room(self) -> int:
        """The tokens that there is room for beside the running sequences."""
        return self.pages.pool.num_free * self.pages.page_size

    @property
    def num_used(self) -> int:
        """The units of all kinds that sequences hold."""
        return sum(kind.num_held for kind in self.kinds)

    @property
    def num_known(self) -> int:
        """The units of all kinds that a prefix can match."""
        return sum(kind.pool.num_known for kind in self.kinds)

    def room_for(self, num_tokens: int) -> int:
        """Returns the room that a sequence of so many tokens takes."""
        return self.pages.pages_for(num_tokens) * self.pages.page_size

    def released_room(self, sequence: Sequence) -> int:
        """Returns the room that `release` would make free."""
        return self.pages.pool.num_released(sequence.page_ids) * self.pages.page_size

    def needed_room(self, sequence: Sequence) -> int:
        """Returns the free room that a sequence takes to start, for all its known tokens."""
        return self._num_needed(sequence, self._match(sequence)) * self.pages.page_size

    def _num_needed(self, sequence: Sequence, prefix: Prefix) -> int:
        return self.pages.num_needed(sequence, prefix.pages)

    def _match(self, sequence: Sequence) -> Prefix:
        if not self.caching:
            keys: list[bytes] = []
        else:
            keys = known_keys(sequence, self.pages.page_size)
        size = self.pages.page_size
        num_known, pages = self.pages.match(keys)
        if self.recurrent is None:
            return Prefix(num_known * size, pages, [])
        num_pages, slots = self.recurrent.match(keys[:num_known])
        num_pages_only = (num_known - num_pages) * size
        return Prefix(num_pages * size, pages[:num_pages], slots, num_pages_only)

    def start(self, sequence: Sequence) -> int | None:
        """Gives a sequence the state of its longest known prefix; returns the number of its tokens,
        which need not be computed. Returns None, and changes nothing, if there is no room for all
        the sequence's known tokens."""
        prefix = self._match(sequence)
        if not self.pages.pool.can_allocate(self._num_needed(sequence, prefix)):
            return None
        self.pages.share(sequence, prefix.pages)
        if self.recurrent is not None:
            self.recurrent.share(sequence, prefix.slots)
            self.num_recomputed += prefix.num_pages_only
        self._note_border(sequence, prefix.num_tokens)
        return prefix.num_tokens

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for a running sequence's first `num_tokens`, which the next step may compute:
        then `num_reserved` is at least as many. Returns False, and changes nothing, if there is
        none."""
        # Recurrent states never refuse.
        return all(kind.allocate(sequence, num_tokens) for kind in self.kinds)

    def settle(self, sequence: Sequence, start: int) -> None:
        """Accounts for a step that has computed a sequence's tokens from `start` up to
        `num_computed`; due where these reach `sequence.settles_at`."""
        if self.caching and not sequence.num_kept:
            size = self.pages.page_size
            extend_page_keys(sequence, sequence.num_computed // size, size)
        for kind in self.kinds:
            kind.settle(sequence, start)
        self._note_border(sequence, sequence.num_computed)

    def _note_border(self, sequence: Sequence, num_computed: int) -> None:
        """Notes when `settle` is due next: at the end of a page, and after each step if there are
        recurrent states."""
        size = self.pages.page_size
        if self.recurrent is not None:
            sequence.settles_at = 0
        elif self.caching:
            sequence.settles_at = (num_computed // size + 1) * size
        else:
            sequence.settles_at = NEVER

    def release(self, sequence: Sequence) -> None:
        """Takes all state from a running sequence; what is known of its prefix may stay."""
        for kind in self.kinds:
            kind.release(sequence)

    def forget_prefixes(self) -> None:
        """Lets no later sequence reuse what is computed by now."""
        for kind in self.kinds:
            kind.pool.forget_keys()

    def check_integrity(self, running: SequenceOf[Sequence]) -> None:
        """Asserts that exactly these sequences hold state, each as much as it needs."""
        for kind in self.kinds:
            kind.check_integrity(running)
