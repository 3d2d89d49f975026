"""Which part of a tensor of the checkpoint a rank has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from inference_svc.model.description import Cut, Member


class Part(NamedTuple):
    """Ranges of `rows`, which are put one below the other, and a range of `columns`, None: all. Of
    experts it is of one expert's matrix [out, in]."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return sum(end - start for start, end in self.rows)

    @property
    def of_bias(self) -> Part:
        """The part of the bias of a matrix with this part."""
        return Part(self.rows)


def part_of(cut: Cut | None) -> Part | None:
    """Returns the part of a tensor whose rows are cut; None: all."""
    return None if cut is None else Part((cut.range,))


def part_of_linear(
    members: Sequence[Member], in_cut: Cut | None, *, take_turns: bool = False
) -> Part | None:
    """Returns the part of a weight that has the outputs of these members one below the other, or,
    if they `take_turns`, one of each in turn. None: all."""
    if in_cut is None and all(member.cut is None for member in members):
        return None
    return Part(tuple(_ranges(members, take_turns)), None if in_cut is None else in_cut.range)


def whole_outputs(members: Sequence[Member]) -> int:
    """Returns how many outputs members have on all ranks together."""
    return sum(member.outputs.whole for member in members)


def _ranges(members: Sequence[Member], take_turns: bool) -> Iterator[tuple[int, int]]:
    if take_turns:
        start, end, _ = members[0].outputs
        yield start * len(members), end * len(members)
        return
    first = 0
    for member in members:
        start, end, whole = member.outputs
        yield first + start, first + end
        first += whole
