"""The modules that a list of a config means, by the rules of the library that wrote it.

Patterns come from strangers, and Python's `re` can take longer than the universe on a hostile one.
So they run in the `regex` package, which has a timeout. A pattern is accepted only if `re` accepts
it too, is of printable ASCII, has few counted repeats and none of the syntax that the two packages
read differently; the seconds of all matches of a list come out of one budget.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.settings import NEXT_STEP, Settings, shorten

MAX_PATTERNS = 256
MAX_PATTERN_CHARS = 2048
BUDGET_S = 5.0
"""The seconds that all matches of one list may take."""
_MAX_COUNTS = 2

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_COUNT = re.compile(r"\{\d{1,2}(?:,\d{0,2})?\}")
_READ_DIFFERENTLY = re.compile(r"[^\x20-\x7E]|\[\^?\[|\[:|--|&&|~~|\|\||\\[NUuLpPXGKRhm]|\{")
_RENAMED = (
    ("model.language_model.", "language_model.model."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("lm_head", "language_model.lm_head"),
)
"""Paths of one module in the trees of different versions of transformers: lists are made with the
names of a tree, which a checkpoint's names need not be."""


class ModuleNames:
    """The modules that `key` of a config lists, as names and patterns."""

    def __init__(
        self,
        key: str,
        names: Iterable[str],
        patterns: Iterable[str] = (),
        *,
        are_parts: bool,
        budget_s: float = BUDGET_S,
    ) -> None:
        """Raises UnsupportedModel for a pattern that is not accepted.

        Args:
            key: The place in config.json, for messages.
            names: Paths of modules.
            patterns: Expressions that match from the beginning of a path, as `re.match` does.
            are_parts: Whether a name also means all modules in it, and may leave out the beginning
                of a path.
            budget_s: The seconds that all matches may take.
        """
        self._key = key
        self._names = frozenset(names)
        self._are_parts = are_parts
        self._left_s = budget_s
        sources = list(dict.fromkeys(patterns))
        if len(sources) > MAX_PATTERNS:
            raise self._refused(f"more than {MAX_PATTERNS} patterns")
        self._patterns = tuple(self._compiled(each) for each in sources)

    def __contains__(self, module: str) -> bool:
        """Raises UnsupportedModel once the seconds for patterns are used up."""
        return self.is_named(module) or self.is_matched(module)

    def is_named(self, module: str) -> bool:
        """Returns whether the module is meant by a name."""
        parts = _runs if self._are_parts else _itself
        return any(not self._names.isdisjoint(parts(path)) for path in _paths(module))

    def is_matched(self, module: str) -> bool:
        """Returns whether the module is meant by a pattern. Raises UnsupportedModel once the
        seconds are used up."""
        return any(
            self._matches(pattern, path) for path in _paths(module) for pattern in self._patterns
        )

    def _matches(self, pattern: Any, path: str) -> bool:
        start_s = time.perf_counter()
        try:
            found = self._left_s > 0 and pattern.match(path, timeout=self._left_s) is not None
        except TimeoutError:
            found = False
        self._left_s -= time.perf_counter() - start_s
        if self._left_s <= 0:
            raise self._refused(f"the pattern {shorten(pattern.pattern)} takes too long")
        return found

    def _compiled(self, source: str) -> Any:
        counts = _COUNT.findall(source)
        rest = _COUNT.sub("", source)
        if len(source) > MAX_PATTERN_CHARS or len(counts) > _MAX_COUNTS:
            raise self._refused(f"the pattern {shorten(source)} is too large")
        if _READ_DIFFERENTLY.search(rest):
            raise self._refused(f"the pattern {shorten(source)} has syntax that is not supported")
        # Models without patterns do without the package, as those of the GPU run.
        import regex

        try:
            re.compile(source)
            return regex.compile(source, regex.V0)
        except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
            raise self._refused(f"{shorten(source)} is no pattern: {error}") from error

    def _refused(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._key}: {reason}; {NEXT_STEP}")


def names_or_patterns(settings: Settings, key: str) -> ModuleNames:
    """Returns the modules of a list as compressed-tensors means it: entries that begin with "re:"
    are patterns, the others whole paths.

    Source: `match_name` in compressed_tensors/utils/match.py. Raises UnsupportedModel.
    """
    entries = settings.names(key)
    patterns = [each[3:] for each in entries if each.startswith("re:")]
    names = [each for each in entries if not each.startswith("re:")]
    return ModuleNames(f"{settings.where}.{key}", names, patterns, are_parts=False)


def kept_plain(
    settings: Settings, *keys: str, default: tuple[str, ...] = ("lm_head",), adds: bool = False
) -> ModuleNames:
    """Returns the modules of the first of these lists that is there, as transformers means it, or
    if none is, the default; both if it `adds` them.

    An entry means the modules below it, and may be the end of a path. One with characters that
    paths do not have is a pattern for the beginning of a path, up to a dot.

    Source: `should_convert_module` in transformers/quantizers/quantizers_utils.py; before version
    5 an entry could also stand in the middle of a path. Raises UnsupportedModel.
    """
    key = next((each for each in keys if settings.get(each) is not None), None)
    entries = () if key is None else settings.names(key)
    if key is None or adds:
        entries = (*entries, *default)
    names = [each for each in entries if _PLAIN_NAME.fullmatch(each)]
    patterns = [rf"(?:{each})(?:(?<=\.)|(?=\.|$))" for each in entries if each not in set(names)]
    return ModuleNames(f"{settings.where}.{key or keys[0]}", names, patterns, are_parts=True)


def _paths(module: str) -> Iterator[str]:
    yield module
    for ours, other in _RENAMED:
        if module.startswith(ours):
            yield other + module.removeprefix(ours)


def _itself(path: str) -> tuple[str, ...]:
    return (path,)


def _runs(path: str) -> Iterator[str]:
    """Yields every part of a path that begins and ends at a dot."""
    parts = path.split(".")
    for first in range(len(parts)):
        for end in range(first + 1, len(parts) + 1):
            yield ".".join(parts[first:end])
