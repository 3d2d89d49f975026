"""Takes secrets out of text that people will read: log lines, traces and what `debug` collects."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HIDDEN = "***"
MIN_CHARS = 6
"""Shorter values are words that occur by chance."""

_NAMES = (
    *("token", "secret", "password", "passwd", "pwd", "signature", "credential"),
    *("api_key", "api-key", "apikey", "access_key", "access-key", "accesskey"),
    *("access_key_id", "access-key-id", "accesskeyid"),
)
"""What ends as one of these names a secret."""
_WORDS = (*_NAMES, "sig=", "://", "bearer", "basic", "-----begin", "hf_")
"""One of them, in whatever case, is in all that the patterns match. Most text has none, and to look
for them takes a tenth of the time."""

_PATTERNS = (
    # URL credentials, an authorization header, a key in PEM, a hub's token.
    (re.compile(r"://[^\s/]+@"), f"://{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]{6,}"), rf"\g<1> {HIDDEN}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)", re.S), HIDDEN),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), f"hf_{HIDDEN}"),
    # name=value, also of a signed URL.
    (
        re.compile(
            rf"(?i)((?:\bsig(?==)|{'|'.join(_NAMES)})[\"']?\s*[=:]\s*[\"']?)[^\s&\"',;]{{4,}}"
        ),
        rf"\g<1>{HIDDEN}",
    ),
)


def may_hold_secret(text: str) -> bool:
    """False: `scrubbed` would change nothing, nor would it in a part of this text."""
    # What is counted and timed everywhere, and names no value.
    lower = text.lower().replace("tokens", "").replace("token_", "")
    return any(map(lower.__contains__, _WORDS))


def scrubbed(text: str) -> str:
    """Without what looks like a secret."""
    if may_hold_secret(text):
        for pattern, shown in _PATTERNS:
            text = pattern.sub(shown, text)
    return text


def scrubbed_tree(value: Any, scrub: Callable[[str], str] = scrubbed) -> Any:
    """The same of all strings in what JSON can say, whose escapes could hide a secret, and of what
    is named as one; what JSON cannot say becomes its string."""
    if isinstance(value, str):
        return scrub(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            scrub(key): HIDDEN if _is_secret(key, each) else scrubbed_tree(each, scrub)
            for key, each in ((_word(key), each) for key, each in value.items())
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [scrubbed_tree(each, scrub) for each in value]
    return scrub(_word(value))


def _is_secret(name: str, value: object) -> bool:
    return isinstance(value, str) and value != "" and name.lower().endswith(_NAMES)


def _word(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


class Scrub:
    """Hides these values wherever they occur, and what looks like a secret."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        found = sorted({each for each in secrets if len(each) >= MIN_CHARS}, key=len, reverse=True)
        self._exact = re.compile("|".join(map(re.escape, found))) if found else None

    def exact(self, text: str) -> str:
        """For text with a grammar of its own: only the known values are hidden."""
        return text if self._exact is None else self._exact.sub(HIDDEN, text)

    def text(self, text: str) -> str:
        return scrubbed(self.exact(text))

    def tree(self, value: Any) -> Any:
        """As `scrubbed_tree`."""
        return scrubbed_tree(value, self.text)
