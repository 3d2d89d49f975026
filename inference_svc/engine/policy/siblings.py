"""Sequences that wait for another one to compute the prompt that they have in common."""

from __future__ import annotations

from collections import Counter

from inference_svc.core import Sequence


class Siblings:
    """The first sequence of a group computes the prompt; the others are held until then, and find
    its state in the prefix cache: of a model with recurrent layers as far as one is stored. If it
    ends before, the next one takes its place."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Sequence]] = {}
        self._free: list[Sequence] = []
        self._held: dict[Sequence, None] = {}
        self._of_tenants: Counter[str] = Counter()

    @property
    def held(self) -> list[Sequence]:
        """The sequences that are neither queued nor run."""
        return list(self._held)

    def is_held(self, sequence: Sequence) -> bool:
        return sequence in self._held

    @property
    def num_held(self) -> int:
        return len(self._held)

    def num_of(self, tenant: str) -> int:
        """Returns how many of a tenant are held."""
        return self._of_tenants[tenant]

    def holds(self, sequence: Sequence) -> bool:
        """Adds a sequence; returns whether it is to wait."""
        group = sequence.request.group
        if not group:
            return False
        siblings = self._groups.setdefault(group, [])
        siblings.append(sequence)
        if siblings[0] is sequence:
            return False
        self._held[sequence] = None
        self._of_tenants[sequence.request.tenant] += 1
        return True

    def computed(self, sequence: Sequence) -> None:
        """The sequence has computed its prompt: the others are free."""
        siblings = self._groups.get(sequence.request.group)
        if siblings and siblings[0] is sequence:
            del self._groups[sequence.request.group]
            self._free += siblings[1:]

    def remove(self, sequence: Sequence) -> bool:
        """Removes a sequence that ends; returns whether it was held."""
        group = sequence.request.group
        siblings = self._groups.get(group, [])
        if sequence in siblings:
            was_first = siblings[0] is sequence
            siblings.remove(sequence)
            if not siblings:
                del self._groups[group]
            elif was_first:
                self._free.append(siblings[0])
        if sequence not in self._held:
            return False
        if sequence in self._free:
            self._free.remove(sequence)
        self._release(sequence)
        return True

    def pop_free(self) -> list[Sequence]:
        """Returns the sequences that wait no longer, to be queued."""
        free, self._free = self._free, []
        for sequence in free:
            self._release(sequence)
        return free

    def _release(self, sequence: Sequence) -> None:
        del self._held[sequence]
        tenant = sequence.request.tenant
        self._of_tenants[tenant] -= 1
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]

    def check_integrity(self) -> None:
        """Asserts that each one held is free, or waits for the first of its group."""
        waiting = [each for siblings in self._groups.values() for each in siblings[1:]]
        # A sequence in `_free` is the first of its group.
        assert set(self._held) == {*waiting, *self._free}
        assert all(self._groups.values()), "a group of none"
        assert self._of_tenants == Counter(each.request.tenant for each in self._held)
