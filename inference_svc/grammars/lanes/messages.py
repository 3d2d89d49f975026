"""Messages between the engine and a process that computes masks.

Numbers are packed; in each step all rows share one message. JSON has the parts that are rare.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

_COUNT = struct.Struct("<I")
_STEP = struct.Struct("<II")
_MASK = struct.Struct("<II?")
_HEADER = struct.Struct("<I??d")

RARE_BYTES = 128
"""The JSON of an answer with few news: its grammars' hits and times, a slow row or two."""
MAX_SECONDS = 3600.0
"""More than a process can take from one answer to the next: a grammar that compiles for seconds
ends it."""
MAX_NUMBER = 1 << 32


def usual_bytes(max_rows: int) -> int:
    """Returns the size of an answer with a mask for each of so many rows, and few news."""
    return _HEADER.size + max_rows * _MASK.size + RARE_BYTES


@dataclass(slots=True)
class Work:
    """A request: rows that take a token, as their number and the token; sequences that open; and
    the numbers of rows that close. An opening has the row's `id` and `slot`, its `tenant`, the
    `key`, `kind` and `source` of its grammar, and its `tokens` so far."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    opens: list[dict[str, Any]] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        count, numbers = len(self.steps), chain.from_iterable(self.steps)
        data = struct.pack(f"<I{2 * count}I", count, *numbers)
        if self.opens or self.closes:
            data += json.dumps([self.opens, self.closes]).encode()
        return data

    @classmethod
    def unpack(cls, data: bytes) -> Work:
        [count] = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _STEP.size
        steps = list(_STEP.iter_unpack(data[_COUNT.size : end]))
        opens, closes = json.loads(data[end:]) if len(data) > end else ([], [])
        return cls(steps, opens, closes)


@dataclass(slots=True)
class Written:
    """An answer: masks that were written, as the row's number, how many tokens the row has, and
    whether the answer may end there.

    `has_more`: others are due that there was no time for. `is_busy`: grammars are being compiled.
    `seconds` are of a processor. `errors` has rows that cannot go on, and why; `slow` has rows
    that others must not wait for. `stuck`: a row whose grammar takes too long to compile, or too
    much memory. `num_hits` and `compile_s` are of grammars since the last answer.
    """

    masks: list[tuple[int, int, bool]] = field(default_factory=list)
    has_more: bool = False
    is_busy: bool = False
    seconds: float = 0.0
    errors: list[tuple[int, str]] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    stuck: int | None = None
    num_hits: int = 0
    compile_s: float = 0.0

    def pack(self) -> bytes:
        header = _HEADER.pack(len(self.masks), self.has_more, self.is_busy, self.seconds)
        parts = [header, *(_MASK.pack(*each) for each in self.masks)]
        rare = [self.errors, self.slow, self.stuck, self.num_hits, self.compile_s]
        if any(rare) or self.stuck is not None:
            parts.append(json.dumps(rare).encode())
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes) -> Written:
        """Raises ValueError, struct.error or TypeError for bytes that are no such answer: who wrote
        them runs strangers' grammars."""
        count, has_more, is_busy, seconds = _HEADER.unpack_from(data)
        end = _HEADER.size + count * _MASK.size
        masks = list(_MASK.iter_unpack(data[_HEADER.size : end]))
        if len(masks) != count:
            raise ValueError("it has fewer masks than it names")
        rare = json.loads(data[end:]) if len(data) > end else ([], [], None, 0, 0.0)
        errors, slow, stuck, num_hits, compile_s = rare
        numbers = [row for row, _ in errors] + slow + [num_hits, stuck or 0]
        if not all(type(each) is int and 0 <= each < MAX_NUMBER for each in numbers):
            raise ValueError("it has rows, or hits, that are no numbers")
        # Sums of these are metrics: one NaN would stay in them for ever.
        if not (0 <= seconds < MAX_SECONDS and 0 <= compile_s < MAX_SECONDS):
            raise ValueError("it has times that it cannot have taken")
        return cls(
            masks,
            has_more,
            is_busy,
            seconds,
            [(row, str(error)) for row, error in errors],
            slow,
            stuck,
            num_hits,
            compile_s,
        )
