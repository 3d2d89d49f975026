"""Messages of the contract, made of arguments of any type."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from loadout.errors import InvalidArgument

MAX_SHOWN = 100
"""How much of a value an error quotes."""
_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_UINT32: "an integer from 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "an integer from 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_INT32: "an integer from -2**31 to 2**31 - 1",
    FieldDescriptor.CPPTYPE_INT64: "an integer from -2**63 to 2**63 - 1",
}


def build(kind: type[Message], field: str = "", **values: Any) -> Any:
    """Returns `kind(**values)`. Raises InvalidArgument that names the value that does not fit."""
    message = kind()
    fields = kind.DESCRIPTOR.fields_by_name
    for name, value in values.items():
        subject = f"{field}.{name}" if field else name
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(fields)}"
            raise invalid(subject, f"is not a known field; {hint}")
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, AttributeError) as error:
            requirement = _requirement(fields[name])
            shown = repr(value)
            shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
            raise invalid(subject, f"must be {requirement}, not {shown}") from error
    return message


def _requirement(field: Any) -> str:
    kind = _KINDS.get(field.cpp_type, "")
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        kind = "bytes" if field.type == FieldDescriptor.TYPE_BYTES else "a str"
    elif field.message_type is not None:
        kind = f"a {field.message_type.name}"
    return f"a list, each item {kind}" if field.is_repeated else kind


def invalid(subject: str, text: str) -> InvalidArgument:
    """Returns the error of a field; `text` comes after its name."""
    return InvalidArgument(f"{subject} {text}", code="INVALID_ARGUMENT", subject=subject)


def named(names: Mapping[int, str], name: str, field: str) -> int:
    """Returns the number that the contract has for this name. Raises InvalidArgument."""
    found = next((number for number, each in names.items() if each == name), None)
    if found is None:
        *others, last = names.values()
        allowed = f"{', '.join(others)} or {last}"
        raise invalid(field, f"must be {allowed}, not {str(name)[:32]}")
    return found
