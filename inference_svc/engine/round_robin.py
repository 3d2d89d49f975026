"""Deficit round robin: members are served in rounds, a quantum of tokens each."""

from __future__ import annotations

import heapq
import itertools


class DeficitRoundRobin:
    """The order of service among the members that have work waiting.

    A member's position counts the tokens that it took; its round is position // `quantum`. The
    lowest round goes first, within a round the member that joined it first. So a member is served
    for a quantum, and skips the rounds that it has used up in advance.

    If two members always have work, neither gets ahead of the other by more than `quantum` and its
    largest single charge. New members join the next round: a round ends, however many come.
    """

    def __init__(self, quantum: int) -> None:
        assert quantum > 0
        self.quantum = quantum
        self._round = 0
        self._positions: dict[str, int] = {}
        self._entries: dict[str, tuple[int, int]] = {}  # of members with work waiting
        self._heap: list[tuple[int, int, str]] = []  # of entries, some of them outdated
        self._tickets = itertools.count()
        self._sweep_above = 64

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        """Returns the number of members with work waiting."""
        return len(self._entries)

    def enter(self, name: str) -> None:
        """Adds a member that has work waiting. Credit that it had when it left has expired unless
        its round still runs; debt has not."""
        if name in self._entries:
            return
        position = self._positions.get(name, -1)
        if position < self._round * self.quantum:
            self._positions[name] = (self._round + 1) * self.quantum
        self._push(name)

    def leave(self, name: str) -> None:
        """Removes a member that has no more work waiting."""
        del self._entries[name]
        if len(self._positions) + len(self._heap) > self._sweep_above:
            self._sweep()

    def first(self) -> str | None:
        """Returns the member to serve; the same until one is charged, enters or leaves."""
        while self._heap:
            number, ticket, name = self._heap[0]
            if self._entries.get(name) != (number, ticket):
                heapq.heappop(self._heap)
            elif self._positions[name] // self.quantum > number:
                heapq.heappop(self._heap)
                self._push(name)
            else:
                self._round = max(self._round, number)
                return name
        return None

    def is_near(self, name: str) -> bool:
        """Whether a member that has work waiting is served in this round or the next one."""
        self.first()  # which is of the round that runs
        return self._positions[name] // self.quantum <= self._round + 1

    def charge(self, name: str, num_tokens: int) -> None:
        """Charges a member for tokens that it took. A negative number refunds unused tokens, which
        moves it forward only while others are still ahead."""
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
        """Drops members without work and debt, and outdated entries."""
        paid = (self._round + 1) * self.quantum
        self._positions = {
            name: position
            for name, position in self._positions.items()
            if name in self._entries or position > paid
        }
        self._heap = [(*entry, name) for name, entry in self._entries.items()]
        heapq.heapify(self._heap)
        self._sweep_above = 2 * (len(self._positions) + len(self._heap)) + 64
