"""Calls of tools that an answer has to make, or makes in place of a text that has a form, as a
grammar: texts, tokens, and the arguments between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from inference_svc.grammars.arguments import ArgumentStyle, shared_of, to_rules
from inference_svc.grammars.parts import Part, written

JsonOf = Callable[[Mapping[str, Any]], str]
"""Makes a JSON schema's part of a rule."""


class Call(NamedTuple):
    """A call of one tool: a begin, arguments that match the `schema`, and an end. `style` None: the
    arguments are JSON."""

    begin: Sequence[Part]
    schema: Mapping[str, Any]
    end: Sequence[Part]
    style: dict[str, Any] | None = None


class Calls(NamedTuple):
    """The `calls` that are possible: one, or several with `separator` between, up to `max_calls`
    (0: any number), after `begin` and before `end`. With `is_json` each call is a JSON object."""

    calls: Sequence[Call]
    begin: Sequence[Part] = ()
    separator: Sequence[Part] | None = None
    end: Sequence[Part] = ()
    max_calls: int = 0
    is_json: bool = False

    def to_source(self) -> str:
        return json.dumps(self)

    @classmethod
    def of_source(cls, source: str) -> Calls:
        calls, *others = json.loads(source)
        return cls([Call(*each) for each in calls], *others)

    @property
    def first_chars(self) -> list[str]:
        """The characters that calls begin with; none if they begin with a special token."""
        firsts = [(self.begin or call.begin)[0] for call in self.calls]
        return sorted({first[0] for first in firsts if isinstance(first, str)})

    def alone(self) -> Iterator[Calls]:
        """Yields each call as the only one that is possible."""
        for call in self.calls:
            yield self._replace(calls=[call])

    def to_lark(self, json_of: JsonOf, start: str = "start", *, as_objects: bool = False) -> str:
        """Returns the grammar in Lark, with the name of its first rule; `as_objects` calls are JSON
        with any space between their parts. Raises ValueError for schemas that are not enforced."""
        rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(self.calls)))}"]
        for index, call in enumerate(self.calls):
            name = f"arguments_{index}"
            if as_objects:
                rules.append(f"call_{index}: {json_of(_as_object(call))}")
                continue
            rules.append(f"call_{index}: {written(call.begin)} {name} {written(call.end)}")
            if call.style is None:
                rules.append(f"{name}: {json_of(call.schema)}")
            else:
                rules += to_rules(ArgumentStyle(**call.style), call.schema, json_of, name)
        more = ""
        if self.separator is not None and self.max_calls != 1:
            times = f"{{0,{self.max_calls - 1}}}" if self.max_calls else "*"
            more = f"({written(self.separator)} call){times}"
        calls = f"{written(self.begin)} call {more} {written(self.end)}"
        return "\n".join([f"{start}: {calls}", *rules, ""])


def _as_object(call: Call) -> dict[str, Any]:
    """Returns the schema of a call whose texts and arguments are one JSON object."""
    text = "".join(map(str, [*call.begin, "null", *call.end]))
    fields = {
        name: call.schema if value is None else {"const": value}
        for name, value in json.loads(text).items()
    }
    object_of = {"type": "object", "properties": fields, "additionalProperties": False}
    return {**shared_of(call.schema), **object_of, "required": list(fields)}


class CallsOrForm(NamedTuple):
    """Calls, or a text that has a form, of a kind and with a source; before that text `begin` may
    come."""

    calls: str
    begin: Sequence[Part]
    kind: str
    source: str

    def to_source(self) -> str:
        return json.dumps(self)

    @classmethod
    def of_source(cls, source: str) -> CallsOrForm:
        return cls(*json.loads(source))

    @property
    def is_joined(self) -> bool:
        """Whether all is in one grammar, which decides between two objects where they differ."""
        return self.kind == "json_schema" and Calls.of_source(self.calls).is_json

    def to_lark(self, json_of: JsonOf, form_to_lark: Callable[[str, str], str]) -> str:
        """Returns the grammar in Lark; `form_to_lark` makes a form's. Raises ValueError for schemas
        that are not enforced."""
        calls = Calls.of_source(self.calls)
        if self.is_joined:
            rules = calls.to_lark(json_of, "calls", as_objects=True)
            form = form_to_lark(self.kind, self.source).removeprefix("start: ")
            return f"start: calls | form\n{rules}form: {form}"
        before = f"({written(self.begin)})?" if self.begin else ""
        return (
            f"start: calls | {before} form\n"
            f"calls: %lark {{\n{calls.to_lark(json_of)}\n}}\n"
            f"form: %lark {{\n{form_to_lark(self.kind, self.source)}\n}}\n"
        )
