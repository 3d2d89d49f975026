"""Parts of a text that a grammar allows, in Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Part = str | int
"""A text, or the id of a special token."""


def written(parts: Sequence[Part]) -> str:
    """Returns parts in Lark."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)


def literal(text: str) -> str:
    """Returns a regular expression for one text."""
    return re.sub(r"[^\w ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)
