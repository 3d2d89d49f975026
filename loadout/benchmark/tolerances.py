"""How much worse than its baseline each metric may be."""

from __future__ import annotations

import math
from collections.abc import Iterable

from loadout.benchmark.measure import METRICS
from loadout.errors import InvalidArgument


def read_tolerances(texts: Iterable[str]) -> dict[str, float]:
    """By metric. Each text is a share such as "10%" or "0.1", which is meant for all metrics, or
    "METRIC=SHARE". One metric's own goes before that of all, whatever the order.

    Raises InvalidArgument.
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
            raise _bad(text, f"there is no metric {name!r}, only {', '.join(METRICS)}")
    return found | named


def _share(share: str, text: str) -> float:
    number, is_percent = share.removesuffix("%"), share.endswith("%")
    try:
        value = float(number) / (100 if is_percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise _bad(text, f"{share!r} is no share such as 10%")
    return value


def _bad(text: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"--tolerance {text}: {why}", code="INVALID_ARGUMENT", subject="tolerance"
    )
