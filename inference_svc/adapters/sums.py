"""Sums of adapters that requests wait for or run with. Each is resident when its parts are.

Nothing is held while a sum waits: `Residency` acquires its parts at once, when all of them are
resident. None waits for ever: whose turn comes first is decided among requests, parts follow one
another in that order, and memory for an aged one is taken from the requests behind it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from contract.images.header import ImageHeader
from contract.images.segment_kinds import SegmentKind
from contract.words import listed
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.core import AdapterKey, Digest, Part, Sum
from inference_svc.errors import AdapterUnusable, NoRoom
from kernels.lora.table import MAX_PARTS
from servicekit.errors import ServiceError


class WaitingSums:
    """Counts the requests that wait for each sum, and finds the sums of an adapter."""

    def __init__(self) -> None:
        self._num_waiting: Counter[Sum] = Counter()
        self._of_part: defaultdict[Digest, dict[Sum, None]] = defaultdict(dict)

    def add(self, key: Sum) -> None:
        self._num_waiting[key] += 1
        for part in key.parts:
            self._of_part[part.digest][key] = None

    def remove(self, key: Sum) -> None:
        self._num_waiting[key] -= 1
        if self._num_waiting[key]:
            return
        del self._num_waiting[key]
        for digest in {part.digest for part in key.parts}:
            del self._of_part[digest][key]
            if not self._of_part[digest]:
                del self._of_part[digest]

    def of_part(self, digest: Digest) -> list[Sum]:
        """Returns the waiting sums that this adapter is a part of."""
        return list(self._of_part.get(digest, ()))

    def check_integrity(self, waiting: Counter[AdapterKey]) -> None:
        """Asserts that the sums are the ones of `waiting`, the requests by key."""
        sums = {key: count for key, count in waiting.items() if isinstance(key, Sum)}
        assert self._num_waiting == Counter(sums)
        parts = {(part.digest, key) for key in sums for part in key.parts}
        assert parts == {(digest, key) for digest, keys in self._of_part.items() for key in keys}
        assert all(self._of_part.values()), "an adapter without a sum"


@dataclass(slots=True)
class _Mix:
    slot: int
    users: int = 0


class Mixes:
    """The table's `num_mixes` mixes, whose first rows begin at `first_slot`: one to each sum that
    runs."""

    def __init__(self, first_slot: int, num_mixes: int) -> None:
        last = first_slot + num_mixes * MAX_PARTS
        self._num_mixes = num_mixes
        self._free = list(range(first_slot, last, MAX_PARTS))[::-1]
        self._by_key: dict[Sum, _Mix] = {}

    def add_user(self, key: Sum) -> tuple[int, bool]:
        """Returns the slot of a sum that one more request runs with, and whether it is the first:
        the mix is still to be written."""
        mix = self._by_key.get(key)
        is_new = mix is None
        if mix is None:
            mix = self._by_key[key] = _Mix(self._free.pop())
        mix.users += 1
        return mix.slot, is_new

    def remove_user(self, key: Sum) -> None:
        mix = self._by_key[key]
        mix.users -= 1
        if not mix.users:
            del self._by_key[key]
            self._free.append(mix.slot)

    def check_integrity(self, running: Counter[AdapterKey]) -> None:
        """Asserts that the mixes belong to `running`, the requests by key."""
        users = {key: mix.users for key, mix in self._by_key.items()}
        assert users == {key: n for key, n in running.items() if isinstance(key, Sum)}
        slots = [mix.slot for mix in self._by_key.values()] + self._free
        assert len(set(slots)) == len(slots) == self._num_mixes, "a mix is lost or held twice"


@dataclass(frozen=True, slots=True)
class SumChecks:
    """Checks whether adapters can be summed. `device` accounts for the arena; single adapters may
    add up to `max_added_tokens` to the vocabulary."""

    layout: ModelLayout
    device: Slots
    max_added_tokens: int

    def refusal(
        self, key: Sum, headers: Mapping[Digest, ImageHeader]
    ) -> tuple[Digest, ServiceError] | None:
        """Returns why a sum can never run, as far as `headers` of its parts are known, and the part
        that the error names, "" for none."""
        known = {part: headers[part.digest] for part in key.parts if part.digest in headers}
        refused = self._refused_part(known) or self._refused_lookup(known)
        if refused is not None:
            return refused
        if not self.device.pins.admits_together(len(key.parts), list(known.values())):
            message = (
                f"the {len(key.parts)} adapters of the request do not fit into the memory for "
                "adapters together: use fewer, unpin others, or raise --adapter-memory or "
                "--max-loras"
            )
            return "", NoRoom(message, subject="adapters")
        return None

    def _refused_part(
        self, headers: Mapping[Part, ImageHeader]
    ) -> tuple[Digest, ServiceError] | None:
        """Returns why the parts cannot be summed: of each target at most one may scale or replace a
        weight of the base, and the replacement is either there or not."""
        replaced = set[str]()
        for part, header in headers.items():
            names = sorted(self.layout.replaced_targets(header))
            if names and part.scale != 1.0:
                message = (
                    f"adapter {part.digest} scales or replaces the model's own weights of "
                    f"{listed(names)}: give it the scale 1, not {part.scale:g}, or use it alone"
                )
                return part.digest, AdapterUnusable(message, subject="adapters")
            twice = [name for name in names if name in replaced]
            if twice:
                message = (
                    f"adapter {part.digest} cannot be summed with one before it: both scale or "
                    f"replace the model's own weights of {listed(twice)}"
                )
                return part.digest, AdapterUnusable(message, subject="adapters")
            replaced.update(names)
        return None

    def _refused_lookup(
        self, headers: Mapping[Part, ImageHeader]
    ) -> tuple[Digest, ServiceError] | None:
        """Returns why not either: rows of one part may be of tokens that it adds, for which A of
        another's embedding has none."""
        if not self.max_added_tokens:
            return None
        for part, header in headers.items():
            others = (each for other, each in headers.items() if other != part)
            if self.layout.has_lookup(header) and any(map(_has_row_ids, others)):
                message = (
                    f"adapter {part.digest} has A and B of the embedding, and cannot be summed "
                    "with an adapter that has rows of its own for tokens: its tokens may lie "
                    "after the vocabulary (--max-added-tokens)"
                )
                return part.digest, AdapterUnusable(message, subject="adapters")
        return None


def _has_row_ids(header: ImageHeader) -> bool:
    return any(segment.kind is SegmentKind.ROW_IDS for segment in header.segments)
