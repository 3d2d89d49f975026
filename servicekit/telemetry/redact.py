"""Hides secrets in text that people will read: log lines, traces and debug bundles."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HIDDEN = "***"
MIN_CHARS = 6
"""Shorter known secrets are ignored: they occur by chance."""

_NAMES = (
    *("token", "secret", "password", "passwd", "pwd", "signature", "credential"),
    *("api_key", "api-key", "apikey", "access_key", "access-key", "accesskey"),
    *("access_key_id", "access-key-id", "accesskeyid"),
)
"""A field whose name ends in one of these holds a secret."""
_WORDS = (*_NAMES, "sig=", "://", "bearer", "basic", "-----begin", "hf_")
"""Every match of a pattern contains one of these, in any case. Most text contains none, and this
check takes a tenth of the patterns' time."""

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
    """Returns False if `redact` would change neither this text nor any part of it."""
    # Token counts and times are logged everywhere and name no secret.
    lower = text.lower().replace("tokens", "").replace("token_", "")
    return any(map(lower.__contains__, _WORDS))


def redact(text: str) -> str:
    """Returns the text with everything hidden that looks like a secret."""
    if may_hold_secret(text):
        for pattern, shown in _PATTERNS:
            text = pattern.sub(shown, text)
    return text


def redact_tree(value: Any, redact_text: Callable[[str], str] = redact) -> Any:
    """Applies `redact_text` to all strings of a JSON-like value before escapes could hide a secret,
    and hides fields named like secrets. Values that JSON does not have become their strings."""
    if isinstance(value, str):
        return redact_text(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            redact_text(key): (HIDDEN if _is_secret(key, each) else redact_tree(each, redact_text))
            for key, each in ((_string(key), each) for key, each in value.items())
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [redact_tree(each, redact_text) for each in value]
    return redact_text(_string(value))


def _is_secret(name: str, value: object) -> bool:
    return isinstance(value, str) and value != "" and name.lower().endswith(_NAMES)


def _string(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


class Redactor:
    """Hides known secrets wherever they occur, and everything that looks like a secret."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        found = sorted({each for each in secrets if len(each) >= MIN_CHARS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, found))) if found else None

    def redact_known(self, text: str) -> str:
        """Hides the known secrets only, in text whose grammar the patterns could break."""
        return text if self._known is None else self._known.sub(HIDDEN, text)

    def redact(self, text: str) -> str:
        return redact(self.redact_known(text))

    def redact_tree(self, value: Any) -> Any:
        return redact_tree(value, self.redact)
