"""Deficit round robin: members are served in rounds, a quantum of tokens each."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class DeficitRoundRobin(Generic[Member]):
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
        self._positions: dict[Member, int] = {}
        self._entries: dict[Member, tuple[int, int]] = {}  # of members with work waiting
        self._heap: list[tuple[int, int, Member]] = []  # of entries, some of them outdated
        self._tickets = itertools.count()
        self._sweep_above = 64

    def __contains__(self, member: Member) -> bool:
        return member in self._entries

    def __len__(self) -> int:
        """Returns the number of members with work waiting."""
        return len(self._entries)

    def enter(self, member: Member) -> None:
        """Adds a member that has work waiting. Credit that it had when it left has expired unless
        its round still runs; debt has not."""
        if member in self._entries:
            return
        position = self._positions.get(member, -1)
        if position < self._round * self.quantum:
            self._positions[member] = (self._round + 1) * self.quantum
        self._push(member)

    def leave(self, member: Member) -> None:
        """Removes a member that has no more work waiting."""
        del self._entries[member]
        if len(self._positions) + len(self._heap) > self._sweep_above:
            self._sweep()

    def first(self) -> Member | None:
        """Returns the member to serve; the same until one is charged, enters or leaves."""
        while self._heap:
            number, ticket, member = self._heap[0]
            if self._entries.get(member) != (number, ticket):
                heapq.heappop(self._heap)
            elif self._positions[member] // self.quantum > number:
                heapq.heappop(self._heap)
                self._push(member)
            else:
                self._round = max(self._round, number)
                return member
        return None

    def is_near(self, member: Member) -> bool:
        """Whether a member that has work waiting is served in this round or the next one."""
        self.first()  # which is of the round that runs
        return self._positions[member] // self.quantum <= self._round + 1

    def charge(self, member: Member, num_tokens: int) -> None:
        """Charges a member for tokens that it took. A negative number refunds unused tokens, which
        moves it forward only while others are still ahead."""
        if member not in self._positions:
            return
        position = max(self._positions[member] + num_tokens, self._round * self.quantum)
        self._positions[member] = position
        if member in self._entries and position // self.quantum < self._entries[member][0]:
            self._push(member)

    def _push(self, member: Member) -> None:
        entry = self._positions[member] // self.quantum, next(self._tickets)
        self._entries[member] = entry
        heapq.heappush(self._heap, (*entry, member))

    def _sweep(self) -> None:
        """Drops members without work and debt, and outdated entries."""
        paid = (self._round + 1) * self.quantum
        self._positions = {
            member: position
            for member, position in self._positions.items()
            if member in self._entries or position > paid
        }
        self._heap = [(*entry, member) for member, entry in self._entries.items()]
        heapq.heapify(self._heap)
        self._sweep_above = 2 * (len(self._positions) + len(self._heap)) + 64
