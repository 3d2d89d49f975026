"""Which part of a tensor of the checkpoint a rank has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    def of_all_columns(self) -> Part:
        """The same rows with all of their columns; also the part of the matrix's bias."""
        return Part(self.rows)


def part_of(cuts: Sequence[Cut]) -> Part | None:
    """Returns the part of a tensor whose rows are cut, each kind of them by itself; None: all."""
    return Part(tuple(_behind_each_other(cuts))) if cuts else None


def part_of_linear(
    members: Sequence[Member], in_cut: Cut | None, *, take_turns: bool = False
) -> Part | None:
    """Returns the part of a weight that has the outputs of these members one below the other, or,
    if they `take_turns`, one of each in turn. None: all."""
    if in_cut is None and not any(member.cuts for member in members):
        return None
    return Part(tuple(_ranges(members, take_turns)), None if in_cut is None else in_cut.range)


def whole_outputs(members: Sequence[Member]) -> int:
    """Returns how many outputs members have on all ranks together."""
    return sum(member.whole_size for member in members)


def _ranges(members: Sequence[Member], take_turns: bool) -> Iterator[tuple[int, int]]:
    if take_turns:
        [(start, end, _)] = members[0].outputs
        yield start * len(members), end * len(members)
        return
    yield from _behind_each_other([cut for member in members for cut in member.outputs])


def _behind_each_other(cuts: Iterable[Cut]) -> Iterator[tuple[int, int]]:
    """Yields the rows of each cut in a tensor that has the whole of one behind the other."""
    first = 0
    for start, end, whole in cuts:
        yield first + start, first + end
        first += whole
