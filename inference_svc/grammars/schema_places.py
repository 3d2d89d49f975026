"""Finds the part of a JSON schema that an engine refuses, and leaves out keywords that forbid
nothing: libraries write them, and an engine may refuse them by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
CONDITIONS = ("not", "if", "then", "else")
SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")
SHARED = ("$defs", "definitions")
"""Schemas that others refer to from the root."""
IDLE: dict[str, tuple[Any, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),  # of each record in Zod
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Values of keywords that allow everything."""
MAX_DEPTH = 64

Refusal = Callable[[dict[str, Any]], str]
"""Returns why a schema is refused; "" if it is not."""


def without_idle(schema: Any) -> Any:
    """Returns the schema without keywords that forbid nothing, here and in the schemas within it.
    Raises RecursionError for one that is nested too deeply."""
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if value in IDLE.get(name, ()):
            continue
        if name in MAPS and isinstance(value, dict):
            value = {key: without_idle(each) for key, each in value.items()}
        elif name in LISTS and isinstance(value, list):
            value = [without_idle(each) for each in value]
        elif name in SINGLE + CONDITIONS:
            value = without_idle(value)
        found[name] = value
    return found


def bad_place(root: Mapping[str, Any], error: str, refusal: Refusal) -> str:
    """Returns the JSON path of the innermost part of a schema that is refused with the `error` of
    the whole, such as "$.properties.a"."""
    shared = {name: root[name] for name in SHARED if name in root}
    place, part = "$", root
    for _ in range(MAX_DEPTH):
        inner = _reference(root, part)
        candidates = _parts(part, place) if inner is None else iter([inner])
        for name, each in candidates:
            if refusal({**shared, **each}) == error:
                place, part = name, each
                break
        else:
            break
    return place


def _reference(
    root: Mapping[str, Any], part: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]] | None:
    """Returns the place and the schema that a schema refers to; None if it refers to none here."""
    target = part.get("$ref")
    if not isinstance(target, str) or not target.startswith("#/"):
        return None
    place, found = "$", root
    for name in target[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name, {})
        place = f"{place}.{name}"
        if not isinstance(found, Mapping) or not found:
            return None
    return place, found


def _parts(schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the schemas within one, with their places."""
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            found = [(f"{place}.{name}.{key}", each) for key, each in value.items()]
        elif name in LISTS and isinstance(value, list):
            found = [(f"{place}.{name}[{index}]", each) for index, each in enumerate(value)]
        else:
            found = [(f"{place}.{name}", value)] if name in SINGLE + CONDITIONS else []
        yield from ((path, each) for path, each in found if isinstance(each, dict))
