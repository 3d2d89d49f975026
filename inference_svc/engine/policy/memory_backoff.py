"""How many tokens are computed at once: fewer after the device has run out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.core import BatchRow

GOOD_STEPS = 32
"""Steps without running out of memory after which twice as many tokens are tried again."""

Rows = tuple[BatchRow, ...]


@dataclass
class StepLimit:
    """At most `max_tokens`, as steps are planned; `num_out_of_memory` counts how often the memory
    did not suffice. It is `max_rows` at least, a step of which all rows decode, which takes little
    and costs much to cut; unless that is too much itself. Rows that it `computes_whole` are not
    cut, but computed fewer at once."""

    max_tokens: int
    max_rows: int = 1
    computes_whole: bool = False
    tokens: int = field(init=False)
    num_out_of_memory: int = 0
    _num_good: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.max_rows <= self.max_tokens
        self.tokens = self.max_tokens

    def cut(self, rows: Rows) -> tuple[Rows, Rows]:
        """Returns the part of a step that is computed at once, and the rest. A row of a prompt may
        be cut: its first part does not sample."""
        if self.tokens == self.max_tokens:
            return rows, ()
        left = self.tokens
        for index, row in enumerate(rows):
            if row.num_tokens <= left:
                left -= row.num_tokens
                continue
            before, after = rows[:index], rows[index + 1 :]
            if self.computes_whole:
                first_rows = max(1, index)
                return rows[:first_rows], rows[first_rows:]
            if not left:
                return before, (row, *after)
            first = row._replace(num_tokens=left, samples=False)
            rest = row._replace(start=row.start + left, num_tokens=row.num_tokens - left)
            return (*before, first), (rest, *after)
        return rows, ()

    def ran_out(self, num_tokens: int) -> None:
        """The memory did not suffice for so many tokens: half of them are the limit."""
        self.num_out_of_memory += 1
        least = self.max_rows if num_tokens > self.max_rows else 1
        self.tokens, self._num_good = max(least, num_tokens // 2), 0

    def succeeded(self) -> None:
        """A whole step was computed."""
        if self.tokens == self.max_tokens:
            return
        self._num_good += 1
        if self._num_good == GOOD_STEPS:
            self.tokens, self._num_good = min(self.max_tokens, 2 * self.tokens), 0
