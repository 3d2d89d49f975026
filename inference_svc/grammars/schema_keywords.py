"""Leaves keywords out of a JSON schema that forbid nothing: libraries write them, and an engine may
refuse them by their names."""

from __future__ import annotations

from typing import Any

from inference_svc.grammars.schema_places import CONDITIONS, LISTS, MAPS, SINGLE

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


def without_idle(schema: Any) -> Any:
    """Returns the schema without such keywords, here and in the schemas within it. Raises
    RecursionError for one that is nested too deeply."""
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
