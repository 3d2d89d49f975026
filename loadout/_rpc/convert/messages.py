"""Messages of the contract, made of arguments of any type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from loadout.errors import InvalidArgument


def build(kind: type[Message], field: str = "", **values: Any) -> Any:
    """Returns `kind(**values)`. Raises InvalidArgument that names the value that does not fit."""
    message = kind()
    for name, value in values.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, AttributeError) as error:
            subject = f"{field}.{name}" if field else name
            raise InvalidArgument(
                f"{subject} cannot be {value!r}: {error}", code="INVALID_ARGUMENT", subject=subject
            ) from error
    return message


def named(names: Mapping[int, str], name: str, field: str) -> int:
    """Returns the number that the contract has for this name. Raises InvalidArgument."""
    found = next((number for number, each in names.items() if each == name), None)
    if found is None:
        *others, last = names.values()
        allowed = f"{', '.join(others)} or {last}"
        raise InvalidArgument(
            f"{field} must be {allowed}, not {str(name)[:32]}",
            code="INVALID_ARGUMENT",
            subject=field,
        )
    return found
