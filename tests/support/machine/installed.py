"""Which packages are needed, by the metadata of those that are installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(requirements: Iterable[str]) -> set[str]:
    """Returns the names of what is required, and of all that this needs here."""
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(each) for each in requirements]
    while left:
        wanted = left.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key not in seen:
            seen.add(key)
            needed = map(Requirement, metadata.requires(wanted.name) or [])
            left += [each for each in needed if _applies(each, wanted.extras)]
    return {name for name, _ in seen}


def _applies(needed: Requirement, extras: set[str]) -> bool:
    marker = needed.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras))
