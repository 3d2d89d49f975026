"""Compares two measurements: whether they can be compared, and what has become worse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loadout.benchmark.measure import METRICS, Figures


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that is another one, by its path."""

    path: str
    before: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """`worse_by` is a share of the baseline, negative if it is better."""

    metric: str
    before: float
    now: float
    tolerance: float

    @property
    def worse_by(self) -> float:
        change = (self.now - self.before) / self.before
        return -change if METRICS[self.metric].is_more_better else change

    @property
    def is_regression(self) -> bool:
        return self.worse_by > self.tolerance


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Of the conditions, in the order of now."""
    flat_before, flat_now = dict(_flat(before)), dict(_flat(now))
    paths = dict.fromkeys([*flat_now, *flat_before])
    return [
        Difference(path, flat_before.get(path), flat_now.get(path))
        for path in paths
        if flat_before.get(path) != flat_now.get(path)
    ]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        yield f"{path}.count", len(value)
        for index, each in enumerate(value):
            yield from _flat(each, f"{path}[{index}]")
    else:
        yield path, value


def verdicts(before: Figures, now: Figures, tolerances: Mapping[str, float]) -> list[Verdict]:
    """Of the metrics that both have; `tolerances` by their names."""
    return [
        Verdict(name, before[name], now[name], tolerances[name])
        for name in METRICS
        if name in before and name in now
    ]
