"""Which modules a PEFT config means, by PEFT's own rules.

Names are paths of modules in the base model, such as "model.layers.0.self_attn.q_proj".
Source: peft/tuners/tuners_utils.py `check_target_module_exists`, peft/utils/other.py
`get_pattern_key`, of PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from adapter_store.checkpoint.json import show
from adapter_store.checkpoint.patterns import MatchBudget, Pattern, compile_pattern
from adapter_store.errors import InvalidAdapter

ALL_LINEAR = "all-linear"
OUTPUT_LAYER = "lm_head"
"""What `all-linear` leaves out: the output layer, by its name in every supported architecture."""

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
    """Whether a config adapts a module: target_modules less exclude_modules, in some layers."""

    def __init__(
        self,
        target_modules: str | tuple[str, ...],
        exclude_modules: str | tuple[str, ...],
        layers_to_transform: tuple[int, ...],
        layers_pattern: tuple[str, ...],
        budget: MatchBudget,
    ) -> None:
        """`fields` holds what is given, as the config names it, lists as sorted sets.

        A string is an expression for the whole path (or "all-linear"); a tuple holds whole
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
        self._is_all_linear = (
            isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR
        )
        self._target = _whole_path("target_modules", target_modules, budget)
        self._exclude_entries = _entries(exclude_modules)
        self._exclude = _whole_path("exclude_modules", exclude_modules, budget)
        self._layers = frozenset(layers_to_transform)
        before, after = r"(?:^|.*?\.)", r"\.(?P<idx>\d+)\."
        self._layer_patterns = [
            compile_pattern("layers_pattern", source, budget, before=before, after=after)
            for source in layers_pattern
        ] or [compile_pattern("layers_pattern", "", budget, before=rf".*?\.[^.]*{after}")]

    def selects(self, name: str, *, is_embedding: bool) -> bool:
        """Whether PEFT would adapt module `name`."""
        if self._is_excluded(name):
            return False
        if self._is_all_linear:
            return not is_embedding and name.rpartition(".")[2] != OUTPUT_LAYER
        if self._target is not None:
            return bool(self._budget.match(self._target, name, full=True))
        if name in self._entries:  # a whole path is meant whatever its layer
            return True
        return not self._entries.isdisjoint(path_tails(name)) and self._is_in_layers(name)

    def unweighted(self, weighted: Iterable[str]) -> frozenset[str]:
        """The listed modules of which none is among the names `weighted`."""
        return self._entries.difference(tail for name in weighted for tail in path_tails(name))

    def _is_excluded(self, name: str) -> bool:
        if self._exclude is not None:
            return bool(self._budget.match(self._exclude, name, full=True))
        return not self._exclude_entries.isdisjoint(path_tails(name))

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
        """An alternative of the pattern matches a path before its layer; PEFT fails there too."""
        return InvalidAdapter(
            f"layers_pattern: {show(pattern.source)} matches a path that it reads no layer from",
            subject="layers_pattern",
            reason="PATTERN_INVALID",
        )


def path_tails(name: str) -> list[str]:
    """What a list may name this path by: all of it, or what follows any of its dots."""
    return [name, *(name[index + 1 :] for index, char in enumerate(name) if char == ".")]


def _entries(value: str | tuple[str, ...]) -> frozenset[str]:
    return frozenset() if isinstance(value, str) else frozenset(value)


def _whole_path(key: str, value: str | tuple[str, ...], budget: MatchBudget) -> Pattern | None:
    """The expression to match in full, if `value` is one."""
    return compile_pattern(key, value, budget) if isinstance(value, str) and value else None
