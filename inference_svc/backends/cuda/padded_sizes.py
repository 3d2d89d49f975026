"""The sizes that steps are padded to, so that few recordings serve all steps."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from typing import NamedTuple

MAX_PROMPT_TOKENS = 2048
"""The most tokens that a step with prompts is padded to: longer steps keep a device busy for longer
than the host takes to launch them."""
FEW_TOKENS = 512
"""Where steps have few tokens, the limit is half of theirs, and at least this: the tensors of
recorded steps have memory of their own."""
USUAL_TOKENS = 256
"""Steps with up to so many tokens, and few rows, are recorded before the first request."""
FEW_ROWS = 16
"""Rows of most steps with prompts. More rows have more logits, and attention has more programs."""


class StepKind(enum.Enum):
    """The contents of a step's adapters: none, A and B alone, or anything, their sums included.
    Recorded steps are of one kind, because further contents of adapters take launches, and others
    do without."""

    BASE = enum.auto()
    LORA = enum.auto()
    ANY = enum.auto()


class StepShape(NamedTuple):
    """All that a recording depends on. Without prompts, each of the rows has one token."""

    kind: StepKind
    num_tokens: int
    num_rows: int
    has_prompts: bool

    @classmethod
    def of_decodes(cls, kind: StepKind, num_rows: int) -> StepShape:
        return cls(kind, num_rows, num_rows, has_prompts=False)


class StepShapes:
    """The shapes for steps of up to `max_tokens` tokens of up to `max_rows` rows. Padding is a row
    of its own, of up to `longest` tokens."""

    def __init__(self, max_tokens: int, max_rows: int, longest: int) -> None:
        self.decode_sizes = decode_sizes(max_rows)
        self.prompt_tokens = prompt_tokens(max_tokens)
        self.prompt_rows = sorted({min(FEW_ROWS, max_rows), max_rows})
        self._longest = longest

    def decodes(self) -> list[StepShape]:
        """Returns all shapes without prompts."""
        return [StepShape.of_decodes(kind, n) for n in self.decode_sizes for kind in StepKind]

    def usual_prompts(self) -> list[StepShape]:
        """Returns shapes with prompts to record before the first request: short ones, one of many
        rows, which take another kernel than few, and the one that takes the most memory."""
        few, most = self.prompt_rows[0], self.prompt_rows[-1]
        usual = [n for n in self.prompt_tokens if n <= min(USUAL_TOKENS, self._longest)]
        shapes = {
            StepShape(kind, n, few, has_prompts=True)
            for kind in (StepKind.BASE, StepKind.LORA)
            for n in usual
        }
        shapes |= {StepShape(StepKind.BASE, n, most, has_prompts=True) for n in usual[:1]}
        shapes.add(StepShape(StepKind.ANY, self.prompt_tokens[-1], most, has_prompts=True))
        return list(shapes)

    def of_decodes(self, kind: StepKind, num_rows: int) -> StepShape | None:
        """Returns the smallest shape for so many decode rows, or None if none has room."""
        size = _smallest(self.decode_sizes, num_rows)
        return None if size is None else StepShape.of_decodes(kind, size)

    def of_prompts(self, kind: StepKind, num_tokens: int, num_rows: int) -> StepShape | None:
        """Returns the smallest shape for a step with prompts, or None if none has room."""
        tokens = _smallest(self.prompt_tokens, num_tokens)
        rows = _smallest(self.prompt_rows, num_rows)
        if tokens is None or rows is None or tokens - num_tokens > self._longest:
            return None
        return StepShape(kind, tokens, rows, has_prompts=True)


def decode_sizes(max_rows: int) -> list[int]:
    """Returns sizes up to `max_rows`: 1, 2, 4, 8, then such that waste at most a third."""
    sizes = {1, 2, 4, max_rows}
    power = 8
    while power < max_rows:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return sorted(size for size in sizes if size <= max_rows)


def prompt_tokens(max_tokens: int) -> list[int]:
    """Returns numbers of tokens for steps of up to `max_tokens`. Up to 256, where a step's time
    hardly depends on them, they waste at most half; beyond, at most a fifth."""
    most = most_prompt_tokens(max_tokens)
    sizes = {16, 32, 64, 96, 128, 192, 256, most}
    sizes |= {*range(256, 1024, 64), *range(1024, most, 128)}
    return sorted(size for size in sizes if size <= most)


def most_prompt_tokens(max_tokens: int) -> int:
    """Returns the most tokens of a recorded step with prompts, if steps have up to `max_tokens`."""
    return min(max_tokens, MAX_PROMPT_TOKENS, max(FEW_TOKENS, max_tokens // 2))


def _smallest(sizes: Sequence[int], wanted: int) -> int | None:
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
