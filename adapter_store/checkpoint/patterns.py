"""Regular expressions from strangers, with their time and memory in bounds.

Python's `re` can take longer than the universe on a hostile pattern and cannot be stopped. So
matching runs in the `regex` package, which has a timeout; only patterns that both packages read
alike are accepted; counted repeats, which `regex` unrolls, are limited; and the seconds spent on
all patterns of one adapter, compiling them included, come out of one budget.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any

import regex

from adapter_store.checkpoint.json import show
from adapter_store.errors import InvalidAdapter

MAX_PATTERN_CHARS = 8192
MAX_UNROLLED_CHARS = 200_000

_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*")
# Read differently by the two packages (fuzzy counts, POSIX classes, set operations) or by a later
# Python; or wide ranges that take milliseconds each to compile. No module path needs them.
_REFUSED = re.compile(r"\[:|\[\^?\[|--|&&|~~|\|\||\{(?!\d{0,6}(,\d{0,6})?\})|[^\x00-\x7F]|\\[uUN]")
_COUNTS = re.compile(r"\{(\d*),?(\d*)\}")


class MatchBudget:
    """The seconds that compiling and matching all patterns of one adapter may take together."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    def spend(self, key: str, source: str, seconds: float) -> None:
        """Raises InvalidAdapter PATTERN_TOO_SLOW, naming the config key, once none is left."""
        self._left_s -= seconds
        if self._left_s < 0:
            raise _invalid(key, "PATTERN_TOO_SLOW", show(source))

    def match(self, pattern: Pattern, text: str, *, full: bool = False) -> Any:
        """As `re.match` or `re.fullmatch`: a match object or None.

        Raises InvalidAdapter PATTERN_TOO_SLOW once the seconds are used up.
        """
        match = pattern.compiled.fullmatch if full else pattern.compiled.match
        start_s = time.perf_counter()
        try:
            # A plain pattern ends soon by itself, but a hundred thousand of them do not.
            found = match(text) if pattern.is_plain else match(text, timeout=max(self._left_s, 0))
        except TimeoutError as exc:
            raise _invalid(pattern.key, "PATTERN_TOO_SLOW", show(pattern.source)) from exc
        self.spend(pattern.key, pattern.source, time.perf_counter() - start_s)
        return found


@dataclass(frozen=True, slots=True)
class Pattern:
    """A checked pattern. `key` is the config key it came from; a plain one matches in `re`."""

    key: str
    source: str
    compiled: Any
    is_plain: bool


def compile_pattern(
    key: str, source: str, budget: MatchBudget, *, before: str = "", after: str = ""
) -> Pattern:
    """Compiles before + source + after; `before` and `after` are our own.

    Raises InvalidAdapter, with the config key as subject: PATTERN_TOO_LARGE, PATTERN_INVALID or
    PATTERN_TOO_SLOW.
    """
    if len(source) > MAX_PATTERN_CHARS:
        raise _invalid(key, "PATTERN_TOO_LARGE", f"{len(source)} characters")
    if _REFUSED.search(source):
        raise _invalid(key, "PATTERN_INVALID", f"{show(source)} uses syntax that is not accepted")
    if _unrolled_chars(source) > MAX_UNROLLED_CHARS:
        raise _invalid(key, "PATTERN_TOO_LARGE", f"the repeats of {show(source)}")
    whole = f"{before}{source}{after}"
    start_s = time.perf_counter()
    try:
        compiled: Any = re.compile(whole)
        is_plain = _PLAIN.fullmatch(source) is not None
        if not is_plain:
            compiled = regex.compile(whole, regex.V0)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as exc:
        raise _invalid(key, "PATTERN_INVALID", f"{show(source)}: {exc}") from exc
    budget.spend(key, source, time.perf_counter() - start_s)
    return Pattern(key, source, compiled, is_plain)


def _unrolled_chars(source: str) -> int:
    """An upper bound of the pattern's length with counted repeats written out, even if nested."""
    counts = (max(int(low or 1), int(high or 1), 1) for low, high in _COUNTS.findall(source))
    return len(source) * math.prod(counts)


def _invalid(key: str, reason: str, detail: str) -> InvalidAdapter:
    return InvalidAdapter(f"{key}: pattern not usable: {detail}", subject=key, reason=reason)
