"""Lists of names in messages for people."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED = 8


def listed(names: Sequence[str]) -> str:
    """Returns the names in a text: of many the first, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
