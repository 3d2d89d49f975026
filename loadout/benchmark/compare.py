"""Compares two measurements: different conditions, tolerances, and regressions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loadout.benchmark.measure import METRICS, Figures
from loadout.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that differs, by its path."""

    path: str
    before: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """One metric before and now, with the share by which it may be worse."""

    metric: str
    before: float
    now: float
    tolerance: float

    @property
    def worse_by(self) -> float:
        """Returns the change for the worse as a share of the baseline; negative if it is better."""
        change = (self.now - self.before) / self.before
        return -change if METRICS[self.metric].is_more_better else change

    @property
    def is_regression(self) -> bool:
        """Returns whether the metric is worse by more than its tolerance."""
        return self.worse_by > self.tolerance


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Returns the conditions that differ, in the order of `now`.

    Args:
        before: Conditions of the baseline.
        now: Conditions of the new measurement.
    """
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
    """Returns a verdict for each metric that both measurements have.

    Args:
        before: Figures of the baseline.
        now: Figures of the new measurement.
        tolerances: Share by which each metric may be worse, by name.
    """
    return [
        Verdict(name, before[name], now[name], tolerances[name])
        for name in METRICS
        if name in before and name in now
    ]


def read_tolerances(texts: Iterable[str]) -> dict[str, float]:
    """Returns the tolerance of each metric.

    Args:
        texts: Shares for all metrics, such as "10%" or "0.1", or "METRIC=SHARE" for one metric,
            which takes precedence in any order.

    Raises:
        InvalidArgument: A text has neither form, or names an unknown metric.
    """
    found = {metric.name: metric.tolerance for metric in METRICS.values()}
    named: dict[str, float] = {}
    for text in texts:
        name, equals, share = text.rpartition("=")
        if not equals:
            found = dict.fromkeys(found, _share(text, text))
        elif name in METRICS:
            named[name] = _share(share, text)
        else:
            raise _invalid(text, f"there is no metric {name!r}, only {', '.join(METRICS)}")
    return found | named


def _share(share: str, text: str) -> float:
    number, is_percent = share.removesuffix("%"), share.endswith("%")
    try:
        value = float(number) / (100 if is_percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise _invalid(text, f"{share!r} is not a share such as 10%")
    return value


def _invalid(text: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"--tolerance {text}: {why}", code="INVALID_ARGUMENT", subject="tolerance"
    )
