"""Deficit round robin: members take turns, and a turn is worth a quantum of tokens."""

from __future__ import annotations

import heapq
import itertools


class Turns:
    """Whose turn it is among the members that have something waiting.

    A member's position counts the tokens that it took; its round is position // `quantum`. The
    lowest round goes first, within a round whoever joined it first. So a member keeps its turn
    for a quantum, and sits out the rounds that it took beforehand.

    Of two members that both wait all the time, none gets more than `quantum` and its largest
    single charge ahead of the other. Newcomers join the next round: a round ends, however many
    come.
    """

    def __init__(self, quantum: int) -> None:
        assert quantum > 0
        self.quantum = quantum
        self._round = 0
        self._positions: dict[str, int] = {}
        self._entries: dict[str, tuple[int, int]] = {}  # of those with something waiting
        self._heap: list[tuple[int, int, str]] = []  # of entries, and of some that are outdated
        self._tickets = itertools.count()
        self._sweep_above = 64

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        """How many have something waiting."""
        return len(self._entries)

    def enter(self, name: str) -> None:
        """The member has something waiting. Credit that it had when it left is gone unless its
        round still is on; debt is not."""
        if name in self._entries:
            return
        position = self._positions.get(name, -1)
        if position < self._round * self.quantum:
            self._positions[name] = (self._round + 1) * self.quantum
        self._push(name)

    def leave(self, name: str) -> None:
        """The member has nothing waiting any more."""
        del self._entries[name]
        if len(self._positions) + len(self._heap) > self._sweep_above:
            self._sweep()

    def first(self) -> str | None:
        """Whose turn it is; the same answer until somebody is charged, enters or leaves."""
        while self._heap:
            turn, ticket, name = self._heap[0]
            if self._entries.get(name) != (turn, ticket):
                heapq.heappop(self._heap)
            elif self._positions[name] // self.quantum > turn:
                heapq.heappop(self._heap)
                self._push(name)
            else:
                self._round = max(self._round, turn)
                return name
        return None

    def charge(self, name: str, num_tokens: int) -> None:
        """The member took this much. Below 0: it gives back what it was charged and did not use,
        which is of use to it only while others are still ahead."""
        if name not in self._positions:
            return
        position = max(self._positions[name] + num_tokens, self._round * self.quantum)
        self._positions[name] = position
        if name in self._entries and position // self.quantum < self._entries[name][0]:
            self._push(name)

    def _push(self, name: str) -> None:
        entry = self._positions[name] // self.quantum, next(self._tickets)
        self._entries[name] = entry
        heapq.heappush(self._heap, (*entry, name))

    def _sweep(self) -> None:
        """Forgets those who wait for nothing and owe nothing, and entries that are outdated."""
        paid = (self._round + 1) * self.quantum
        self._positions = {
            name: position
            for name, position in self._positions.items()
            if name in self._entries or position > paid
        }
        self._heap = [(*entry, name) for name, entry in self._entries.items()]
        heapq.heapify(self._heap)
        self._sweep_above = 2 * (len(self._positions) + len(self._heap)) + 64
