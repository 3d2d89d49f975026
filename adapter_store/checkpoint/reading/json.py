"""Untrusted JSON: one object, UTF-8, no duplicate keys, no NaN, no endless nesting."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from adapter_store.errors import InvalidAdapter


class _DuplicateKey(ValueError):
    """Raised for a key that one object holds twice: readers disagree on which value counts."""


def parse_object(data: bytes, subject: str, *, allows_constants: bool = False) -> dict[str, Any]:
    """Parses one JSON object.

    The caller caps `len(data)`. `subject` names the file in errors. With `allows_constants` the
    numbers NaN and Infinity are read as Python writes them.

    Raises:
        InvalidAdapter: NOT_UTF8, NOT_JSON, NESTED_TOO_DEEPLY, DUPLICATE_KEY or NOT_AN_OBJECT.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=None if allows_constants else _refuse_constant,
        )
    except UnicodeDecodeError as exc:
        raise InvalidAdapter(f"{subject}: not UTF-8", subject=subject, reason="NOT_UTF8") from exc
    except RecursionError as exc:
        raise InvalidAdapter(
            f"{subject}: JSON nested too deeply", subject=subject, reason="NESTED_TOO_DEEPLY"
        ) from exc
    except _DuplicateKey as exc:
        raise InvalidAdapter(
            f"{subject}: duplicate key {exc}", subject=subject, reason="DUPLICATE_KEY"
        ) from exc
    except ValueError as exc:  # also numbers of more digits than Python converts
        raise InvalidAdapter(
            f"{subject}: not JSON ({exc})", subject=subject, reason="NOT_JSON"
        ) from exc
    if not isinstance(value, dict):
        raise InvalidAdapter(
            f"{subject}: not a JSON object", subject=subject, reason="NOT_AN_OBJECT"
        )
    return value


def show(value: object) -> str:
    """Returns an untrusted value for an error message: quoted, escaped, shortened."""
    try:
        text = ascii(value)
    except RecursionError:  # a value that could just be parsed may be too deep to be written
        return "(nested too deeply to show)"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(show(key))
            seen.add(key)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
