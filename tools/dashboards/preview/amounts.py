"""Formats values for people, by Grafana's names of units."""

from __future__ import annotations

import math
from collections.abc import Callable


def show(value: float, unit: str) -> str:
    """Formats a value. Raises KeyError for an unknown unit."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "∞"
    return _SHOWN[unit](value)


def _scaled(value: float, base: float, prefixes: tuple[str, ...], suffix: str) -> str:
    power = 0
    while abs(value) >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g} {prefixes[power]}{suffix}".rstrip()


def _count(suffix: str) -> Callable[[float], str]:
    return lambda value: _scaled(value, 1000, ("", "k", "M", "G"), suffix)


def _bytes(suffix: str) -> Callable[[float], str]:
    return lambda value: _scaled(value, 1024, ("", "Ki", "Mi", "Gi", "Ti"), suffix)


def _seconds(value: float) -> str:
    if value >= 60 or value == 0:
        return f"{value:.0f} s"
    small = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    scale, name = next((each for each in small if value >= each[0]), small[-1])
    return f"{value / scale:.3g} {name}"


_SHOWN: dict[str, Callable[[float], str]] = {
    "s": _seconds,
    "short": _count(""),
    "percentunit": lambda value: f"{100 * value:.3g} %",
    "reqps": _count("req/s"),
    "cps": _count("/s"),
    "si:tok/s": _count("tok/s"),
    "bytes": _bytes("B"),
    "binBps": _bytes("B/s"),
}
