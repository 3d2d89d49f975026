"""Which modules a PEFT config means, by PEFT's own rules, with patterns kept within bounds.

Names are paths of modules in the base model, such as "model.layers.0.self_attn.q_proj".
Source: peft/tuners/tuners_utils.py `check_target_module_exists`, peft/utils/other.py
`get_pattern_key`, of PEFT 0.21.

The patterns are untrusted. Python's `re` can take longer than the universe on a hostile
pattern and cannot be stopped. So matching runs in the `regex` package, which has a timeout; only
patterns that both packages read alike are accepted; counted repeats, which `regex` unrolls, are
limited; and the seconds spent on all patterns of one adapter, compiling them included, come out of
one budget.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import regex

from adapter_store.checkpoint.reading.json import show
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
        """Matches as `re.match` or `re.fullmatch`; returns a match object or None.

        Raises InvalidAdapter PATTERN_TOO_SLOW once the seconds are used up.
        """
        match = pattern.compiled.fullmatch if full else pattern.compiled.match
        start_s = time.perf_counter()
        try:
            # One plain pattern is fast, but a hundred thousand of them are not.
            found = match(text) if pattern.is_plain else match(text, timeout=max(self._left_s, 0))
        except TimeoutError as exc:
            raise _invalid(pattern.key, "PATTERN_TOO_SLOW", show(pattern.source)) from exc
        self.spend(pattern.key, pattern.source, time.perf_counter() - start_s)
        return found


@dataclass(frozen=True, slots=True)
class Pattern:
    """A checked pattern from config key `key`. A plain one is matched by `re`."""

    key: str
    source: str
    compiled: Any
    is_plain: bool


def compile_pattern(
    key: str, source: str, budget: MatchBudget, *, before: str = "", after: str = ""
) -> Pattern:
    """Compiles before + source + after, of which only `source` is untrusted.

    Raises InvalidAdapter, with the config key as subject: PATTERN_TOO_LARGE, PATTERN_INVALID or
    PATTERN_TOO_SLOW.
    """
    if len(source) > MAX_PATTERN_CHARS:
        raise _invalid(key, "PATTERN_TOO_LARGE", f"{len(source)} characters")
    if _REFUSED.search(source):
        raise _invalid(key, "PATTERN_INVALID", f"{show(source)} uses syntax that is not accepted")
    if _unrolled_chars(source) > MAX_UNROLLED_CHARS:
        raise _invalid(key, "PATTERN_TOO_LARGE", f"the repeats of {show(source)}")
    expression = f"{before}{source}{after}"
    start_s = time.perf_counter()
    try:
        compiled: Any = re.compile(expression)
        is_plain = _PLAIN.fullmatch(source) is not None
        if not is_plain:
            compiled = regex.compile(expression, regex.V0)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as exc:
        raise _invalid(key, "PATTERN_INVALID", f"{show(source)}: {exc}") from exc
    budget.spend(key, source, time.perf_counter() - start_s)
    return Pattern(key, source, compiled, is_plain)


def _unrolled_chars(source: str) -> int:
    """Returns an upper bound of the pattern's length with counted repeats written out, even if
    nested."""
    counts = (max(int(low or 1), int(high or 1), 1) for low, high in _COUNTS.findall(source))
    return len(source) * math.prod(counts)


ALL_LINEAR = "all-linear"
OUTPUT_LAYER = "lm_head"
"""The output layer, which `all-linear` leaves out, by its name in every supported architecture."""

NumberT = TypeVar("NumberT", int, float)


class PatternTable(Generic[NumberT]):
    """`rank_pattern` or `alpha_pattern`: the first pattern, in the file's order, that matches."""

    def __init__(self, key: str, values: Mapping[str, NumberT], budget: MatchBudget) -> None:
        self._budget = budget
        self._rows: list[tuple[Pattern, NumberT]] = [
            (compile_pattern(key, source, budget, before=r"(.*\.)?(", after=")$"), value)
            for source, value in values.items()
        ]

    def lookup(self, name: str, default: NumberT) -> NumberT:
        for pattern, value in self._rows:
            if self._budget.match(pattern, name):
                return value
        return default


class ModuleMatcher:
    """Decides whether a config adapts a module: target_modules less exclude_modules, in some
    layers."""

    def __init__(
        self,
        target_modules: str | tuple[str, ...],
        exclude_modules: str | tuple[str, ...],
        layers_to_transform: tuple[int, ...],
        layers_pattern: tuple[str, ...],
        budget: MatchBudget,
    ) -> None:
        """`fields` holds the given fields, as the config names them, lists as sorted sets.

        A string is an expression for the full path (or "all-linear"); a tuple holds full
        paths or their last components. No layers: all of them.

        Raises InvalidAdapter naming the config key whose pattern is not usable.
        """
        given = {
            "target_modules": target_modules,
            "exclude_modules": exclude_modules,
            "layers_to_transform": layers_to_transform,
            "layers_pattern": layers_pattern,
        }
        self.fields: Mapping[str, Any] = {
            key: value if isinstance(value, str) else sorted(set(value))
            for key, value in given.items()
            if value
        }
        self._budget = budget
        self._entries = _entries(target_modules)
        self.is_all_linear = (
            isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR
        )
        self._target = _full_path_pattern("target_modules", target_modules, budget)
        self._exclude_entries = _entries(exclude_modules)
        self._exclude = _full_path_pattern("exclude_modules", exclude_modules, budget)
        self._layers = frozenset(layers_to_transform)
        before, after = r"(?:^|.*?\.)", r"\.(?P<idx>\d+)\."
        self._layer_patterns = [
            compile_pattern("layers_pattern", source, budget, before=before, after=after)
            for source in layers_pattern
        ] or [compile_pattern("layers_pattern", "", budget, before=rf".*?\.[^.]*{after}")]

    def selects(self, name: str, *, is_embedding: bool) -> bool:
        """Returns whether PEFT would adapt module `name`."""
        if self._is_excluded(name):
            return False
        if self.is_all_linear:
            return not is_embedding and name.rpartition(".")[2] != OUTPUT_LAYER
        if self._target is not None:
            return bool(self._budget.match(self._target, name, full=True))
        if name in self._entries:  # a full path is selected in any layer
            return True
        return not self._entries.isdisjoint(path_tails(name)) and self._is_in_layers(name)

    def unweighted(self, weighted: Iterable[str]) -> frozenset[str]:
        """Returns the listed modules that match none of the names `weighted`."""
        left = set(self._entries)
        for name in weighted:
            if not left:
                break
            left.difference_update(path_tails(name))
        return frozenset(left)

    def _is_excluded(self, name: str) -> bool:
        if self._exclude is not None:
            return bool(self._budget.match(self._exclude, name, full=True))
        entries = self._exclude_entries
        return bool(entries) and not entries.isdisjoint(path_tails(name))

    def _is_in_layers(self, name: str) -> bool:
        if not self._layers:
            return True
        for pattern in self._layer_patterns:
            match = self._budget.match(pattern, name)
            if match and match["idx"] is None:
                raise self._without_layer(pattern)
            if match:
                return int(match["idx"]) in self._layers
        return False

    def _without_layer(self, pattern: Pattern) -> InvalidAdapter:
        """Returns the error for a pattern that matches a path without a layer, where PEFT fails
        too."""
        return InvalidAdapter(
            f"layers_pattern: {show(pattern.source)} matches a path that it reads no layer from",
            subject="layers_pattern",
            reason="PATTERN_INVALID",
        )


def path_tails(name: str) -> list[str]:
    """Returns the names that a list may give this path: all of it, or the rest after any of its
    dots."""
    tails = [name]
    while "." in name:
        name = name.partition(".")[2]
        tails.append(name)
    return tails


def _entries(value: str | tuple[str, ...]) -> frozenset[str]:
    return frozenset() if isinstance(value, str) else frozenset(value)


def _full_path_pattern(
    key: str, value: str | tuple[str, ...], budget: MatchBudget
) -> Pattern | None:
    """Returns the expression to match in full, if `value` is one."""
    return compile_pattern(key, value, budget) if isinstance(value, str) and value else None


def _invalid(key: str, reason: str, detail: str) -> InvalidAdapter:
    return InvalidAdapter(f"{key}: pattern not usable: {detail}", subject=key, reason=reason)
