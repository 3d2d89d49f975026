"""Arguments of a call that are not JSON as a whole: each comes by its key, strings as they are, or
between marks. A grammar of them is made of the tool's schema.

Some syntaxes write the arguments alone in this way, and JSON for every value but a string; others
write all objects and lists so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.grammars.parts import Part, literal, written

Schema = Mapping[str, Any]
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions"),
    )
)
"""Keywords that allow and forbid nothing."""
OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
OF_LISTS = frozenset(("type", "items", "minItems", "maxItems"))
OF_STRINGS = frozenset(("type", "enum", "const", "minLength", "maxLength", "pattern"))
OF_NUMBERS = frozenset(
    ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
)
OF_KINDS = {
    "object": OF_OBJECTS,
    "array": OF_LISTS,
    "string": OF_STRINGS,
    "number": OF_NUMBERS,
    "integer": OF_NUMBERS,
}
OF_ALL = frozenset.union(*OF_KINDS.values())
KEY = re.compile(r"[^\s<>{}\[\],:\"]{1,256}")
"""A key that readers find again."""
ANY_TEXT = "/(?s:.*)/"
SCALARS = {"type": ["number", "boolean", "null"]}


@dataclass(frozen=True, slots=True)
class ArgumentStyle:
    """The parts around the arguments of a call. A key is between `key_begin` and `key_end`, and
    `value_end` comes after its value; `begin`, `separator` and `end` are an object's. A string is
    between two `quote`s, as it is in objects and lists within others; without a quote it is as it
    is up to `value_end`, and other values are JSON."""

    key_begin: Sequence[Part]
    key_end: Sequence[Part]
    value_end: Sequence[Part] = ()
    begin: Sequence[Part] = ()
    separator: Sequence[Part] = ()
    end: Sequence[Part] = ()
    quote: Sequence[Part] = ()


def to_rules(
    style: ArgumentStyle, schema: Schema, json_of: Callable[[Schema], str], name: str
) -> list[str]:
    """Returns rules in Lark, of which the first is `name`: the arguments that a schema allows, in
    the order of its properties, and no others. `json_of` makes a JSON schema's part of a rule.
    Raises ValueError for a keyword that is not enforced."""
    rules = _Rules(style, schema, json_of, name)
    try:
        rules.add(name, rules.whole(schema))
    except (AttributeError, TypeError):  # a keyword's value has another type than it must have
        raise ValueError("it is no JSON schema") from None
    return rules.lines[::-1]


class _Rules:
    def __init__(
        self, style: ArgumentStyle, root: Schema, json_of: Callable[[Schema], str], name: str
    ) -> None:
        self._style = style
        self._root = root
        self._json_of = json_of
        self._name = name
        self._num_names = 0
        self._shared: dict[str, str] = {}
        self.lines: list[str] = []

    def add(self, name: str, text: str) -> None:
        self.lines.append(f"{name}: {text}")

    def whole(self, schema: Schema) -> str:
        """Returns an object: its fields in order, those that are not required or left out."""
        _check(schema, OF_OBJECTS)
        style, properties = self._style, schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")
        if unknown := [name for name in required if name not in properties]:
            raise ValueError(f"{json.dumps(unknown[0])} is required, but no property")
        fields = [(self._field(key, value), key in required) for key, value in properties.items()]
        inner = self._members(fields) if style.separator else _in_a_row(fields)
        return f"{written(style.begin)} {inner} {written(style.end)}"

    def _field(self, key: str, schema: object) -> str:
        style = self._style
        if KEY.fullmatch(key) is None:
            raise ValueError(f"this model cannot write the property {json.dumps(key)[:100]}")
        before = f"{written(style.key_begin)} {json.dumps(key)} {written(style.key_end)}"
        return self._new(f"{before} {self.value(schema)}")

    def _members(self, fields: Sequence[tuple[str, bool]]) -> str:
        """Returns fields with a separator between any two that are there."""
        first, later = '""', '""'
        for field, is_required in reversed(fields):
            after = f"{field} {later}"
            first = self._new(after if is_required else f"{after} | {first}")
            more = f"{written(self._style.separator)} {after}"
            later = self._new(more if is_required else f"{more} | {later}")
        return first

    def value(self, schema: object) -> str:
        """Returns a value with its end."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("a property has no value that its schema allows")
        if not self._style.quote:
            if is_text(schema):
                return self._text(schema, self._style.value_end)
            return f"{self._json(schema)} {written(self._style.value_end)}"
        return self._new(self._quoted(schema))

    def _quoted(self, schema: Schema) -> str:
        """Returns a value whose strings have quotes."""
        if "$ref" in schema:
            return self._referred(schema)
        if "anyOf" in schema:
            _check(schema, frozenset(("anyOf",)))
            return " | ".join(map(self.value, schema["anyOf"]))
        if "enum" in schema or "const" in schema:
            return self._chosen(schema)
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            _check(schema, frozenset())
            return f"{self._quote({})} | {self._json(SCALARS)}"
        if isinstance(kinds, list):
            return " | ".join(self.value(_of_kind(schema, kind)) for kind in kinds)
        if kinds == "string":
            return self._quote(schema)
        if kinds == "object":
            return self.whole(schema)
        return self._list(schema) if kinds == "array" else self._json(schema)

    def _referred(self, schema: Schema) -> str:
        _check(schema, frozenset(("$ref",)))
        target = schema["$ref"]
        found: Any = self._root
        names = str(target).split("/")
        if names[0] != "#" or names[1:2] not in (["$defs"], ["definitions"]) or len(names) != 3:
            raise ValueError(f"the reference {json.dumps(target)[:100]} is not one to #/$defs/")
        for name in names[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise ValueError(f"the reference {json.dumps(target)[:100]} leads nowhere")
        if target not in self._shared:
            self._shared[target] = name = self._new_name()
            self.add(name, self.value(found))
        return self._shared[target]

    def _chosen(self, schema: Schema) -> str:
        _check(schema, frozenset(("enum", "const", "type")))
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or any(isinstance(each, dict | list) for each in values):
            raise ValueError("enum must be a list of texts, numbers, booleans and nulls")
        kinds = schema.get("type", "string")
        texts = [each for each in values if isinstance(each, str) and "string" in kinds]
        others = [each for each in values if not isinstance(each, str)]
        kind = {"type": schema["type"]} if "type" in schema else {}
        found = [self._quote({"enum": texts})] if texts else []
        found += [self._json({**kind, "enum": others})] if others else []
        if not found:
            raise ValueError("enum has no value of its type")
        return " | ".join(found)

    def _list(self, schema: Schema) -> str:
        _check(schema, OF_LISTS)
        item = self.value(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise ValueError("minItems and maxItems must be integers")
        if most is not None and most < max(least, 1):
            if most < least:
                raise ValueError("maxItems is less than minItems")
            return '"[" "]"'
        more = f"({written(self._style.separator)} {item})"
        more += f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} {more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _json(self, schema: Schema) -> str:
        shared = shared_of(self._root) if '"$ref"' in json.dumps(schema) else {}
        return self._new(self._json_of({**shared, **schema}))

    def _quote(self, schema: Schema) -> str:
        quote = self._style.quote
        return f"{written(quote)} {self._text(schema, quote)}"

    def _text(self, schema: Schema, end: Sequence[Part]) -> str:
        """Returns a text as it is, and the end after it, which is not in the text."""
        _check(schema, OF_STRINGS)
        bounds = _bounds(schema)
        first, *rest = end
        if isinstance(first, int):
            text = self._terminal(" & ".join(bounds or [ANY_TEXT]))
            return f"{text} {written(end)}"
        mark = first.strip()
        if not bounds:
            name = self._new_name()
            self.add(f"{name}[suffix={json.dumps(mark)}]", ANY_TEXT)
            after = first.partition(mark)[2]
            return f"{name} {written([*([after] if after else []), *rest])}"
        # One terminal with the end: a terminal alone would take the begin of the end for its own.
        bounds += [ANY_TEXT, f"~/(?s:.*){literal(mark)}(?s:.*)/"]
        text = self._terminal(f"({' & '.join(map(self._terminal, bounds))}) {json.dumps(first)}")
        return f"{text} {written(rest)}"

    def _terminal(self, text: str) -> str:
        name = self._new_name().upper()
        self.add(name, text)
        return name

    def _new(self, text: str) -> str:
        name = self._new_name()
        self.add(name, text)
        return name

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self._name}_{self._num_names}"


def is_text(schema: object) -> bool:
    """Returns whether a value whose schema this is can only be a string, where strings come as they
    are: readers take other texts for JSON, where they are JSON."""
    if not isinstance(schema, dict):
        return True
    if {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        return False
    values = schema.get("enum", [schema.get("const", "")])
    is_string = isinstance(values, list) and all(isinstance(each, str) for each in values)
    default = "string" if is_string else "other"
    return bool(schema.get("type", default) == "string")


def shared_of(schema: Schema) -> dict[str, Any]:
    """Returns the parts of a schema that others refer to from the root."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _in_a_row(fields: Sequence[tuple[str, bool]]) -> str:
    found = (field if is_required else f"({field})?" for field, is_required in fields)
    return " ".join(found) or '""'


def _of_kind(schema: Schema, kind: str) -> dict[str, Any]:
    """Returns the part of a schema that is about one of its types."""
    others = OF_ALL - OF_KINDS.get(kind, frozenset())
    return {**{name: value for name, value in schema.items() if name not in others}, "type": kind}


def _bounds(schema: Schema) -> list[str]:
    """Returns regular expressions that a text must match."""
    found = []
    if "enum" in schema or "const" in schema:
        texts = [schema["const"]] if "const" in schema else schema["enum"]
        found.append(f"/{'|'.join(literal(each) for each in texts if isinstance(each, str))}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        raise ValueError("minLength and maxLength must be integers")
    if least or most is not None:
        found.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    if "pattern" in schema:
        found.append(f"/{_anchored(str(schema['pattern']))}/")
    return found


def _anchored(pattern: str) -> str:
    """Returns a regular expression for texts in which a pattern is found."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and _has_alternatives(inner):
        raise ValueError("a pattern with ^ or $ must have its alternatives in a group")
    inner, any_text = inner.replace("/", r"\x2f"), "(?s:.*)"
    return f"{'' if begins else any_text}(?:{inner}){'' if ends else any_text}"


def _has_alternatives(pattern: str) -> bool:
    """Returns whether a pattern has alternatives outside of its groups."""
    pattern = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    depth = 0
    for char in pattern:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def _check(schema: Schema, known: frozenset[str]) -> None:
    """Raises ValueError for keywords that have no grammar."""
    unknown = sorted(schema.keys() - known - ANNOTATIONS)
    if unknown:
        raise ValueError(
            f"this model does not write these arguments as JSON, so {json.dumps(unknown)} "
            "cannot be enforced"
        )
