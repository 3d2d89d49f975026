"""Lists of names in messages for people."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED = 8


def listed(names: Sequence[str], rest: str = "more") -> str:
    """Returns the names in a text: of many the first, and how many more there are.

    Args:
        names: The names, in order.
        rest: The word after the number of the others.
    """
    others = f" and {len(names) - MAX_LISTED} {rest}" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + others
