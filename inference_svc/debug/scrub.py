"""Takes secrets out of text that leaves the server for people to read."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
MIN_CHARS = 6
"""Shorter values are words that occur by chance."""

_PATTERNS = (
    # URL credentials, an authorization header, a key in PEM.
    (re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@]+@"), rf"\g<1>{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/._~=-]{6,}"), rf"\g<1> {HIDDEN}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|$)", re.S), HIDDEN),
    # name=value, also of a signed URL.
    (
        re.compile(
            r"(?i)((?:token|secret|password|passwd|signature|credential|api[_-]?key|"
            r"access[_-]?key(?:[_-]?id)?)[\"']?\s*[=:]\s*[\"']?)[^\s&\"',;]{4,}"
        ),
        rf"\g<1>{HIDDEN}",
    ),
)


class Scrub:
    """Hides these values wherever they occur, and what looks like a secret."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        found = sorted({each for each in secrets if len(each) >= MIN_CHARS}, key=len, reverse=True)
        self._exact = re.compile("|".join(map(re.escape, found))) if found else None

    def exact(self, text: str) -> str:
        """For text with a grammar of its own: only the known values are hidden."""
        return text if self._exact is None else self._exact.sub(HIDDEN, text)

    def text(self, text: str) -> str:
        text = self.exact(text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def tree(self, value: Any) -> Any:
        """The same of all strings in what JSON can say; what it cannot becomes its string."""
        if isinstance(value, Mapping):
            return {self.tree(_word(key)): self.tree(each) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.tree(each) for each in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return self.text(_word(value))


def _word(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)
