"""Structured answers of the zoo's models, whose tokens are the characters of ASCII."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inference_svc.grammars.vocabulary import Vocabulary, make_vocabulary
from tests.support.models.zoo import VOCAB

Schema = dict[str, Any]

EOS = 2
SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite" / "draft4.json"


class _Character:
    def __init__(self, token_id: int) -> None:
        self.text = chr(token_id)
        self.shown = self.text.encode() if token_id > EOS else b""


class _Characters:
    def of(self, token_id: int) -> _Character:
        return _Character(token_id)


def zoo_vocabulary() -> Vocabulary:
    return make_vocabulary(_Characters(), VOCAB, (EOS,))


def text_of(tokens: list[int]) -> str:
    """Returns an answer without its end token."""
    return "".join(map(chr, tokens[:-1] if tokens[-1:] == [EOS] else tokens))


def suite() -> dict[str, Any]:
    """Returns the schemas of the JSON Schema test suite, by what they test."""
    found: dict[str, Any] = json.loads(SUITE.read_text())
    return found


def random_schemas(count: int, seed: int = 0) -> Iterator[Schema]:
    """Yields schemas of all kinds that agents send."""
    chosen = random.Random(seed)
    for _ in range(count):
        schema = _schema(chosen, chosen.choice((1, 1, 2, 2, 3)))
        if chosen.random() < 0.2:
            named = {"$defs": {"part": _schema(chosen, 1)}}
            schema = {**named, "type": "object", "properties": {"x": {"$ref": "#/$defs/part"}}}
            schema |= {"required": ["x"], "additionalProperties": chosen.random() < 0.3}
        yield schema


def _schema(chosen: random.Random, depth: int) -> Schema:
    makers = [_string, _number, _enum, _nothing]
    if depth:
        makers += [_object, _object, _array, _any_of]
    return chosen.choice(makers)(chosen, depth)


def _string(chosen: random.Random, depth: int) -> Schema:
    forms: list[Schema] = [
        {},
        {"minLength": 2, "maxLength": 5},
        {"maxLength": 3},
        {"pattern": chosen.choice(("^[a-c]+$", "^x{2,4}y?$", "[0-9]{2}", "^(ab|cd)*e$"))},
        {"format": chosen.choice(("date", "time", "uuid", "ipv4", "email", "date-time"))},
    ]
    return {"type": "string", **chosen.choice(forms)}


def _number(chosen: random.Random, depth: int) -> Schema:
    low = chosen.randrange(-20, 20)
    bounds: list[Schema] = [
        {},
        {"minimum": low},
        {"maximum": low},
        {"minimum": low, "maximum": low + chosen.randrange(9)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 7},
        {"multipleOf": chosen.randrange(1, 9)},
    ]
    return {"type": chosen.choice(("integer", "number")), **chosen.choice(bounds)}


def _enum(chosen: random.Random, depth: int) -> Schema:
    values = [1, -2.5, None, True, "a", 'q"\\', "e\n", [], [1], {"a": None}, {}]
    if chosen.random() < 0.3:
        return {"const": chosen.choice(values)}
    return {"enum": chosen.sample(values, chosen.randrange(1, 5))}


def _nothing(chosen: random.Random, depth: int) -> Schema:
    return {"type": chosen.choice(("null", "boolean"))}


def _object(chosen: random.Random, depth: int) -> Schema:
    names = chosen.sample(["a", "b c", "d", 'e"', "f", "g"], chosen.randrange(4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(chosen, depth - 1) for name in names},
        "required": chosen.sample(names, chosen.randrange(len(names) + 1)),
    }
    others: list[Any] = [False, False, True, {"type": "integer"}]
    schema["additionalProperties"] = chosen.choice(others)
    if chosen.random() < 0.2:
        schema |= {"title": "T", "description": "It is one.", "default": {}, "examples": [1]}
    return schema


def _array(chosen: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _schema(chosen, depth - 1)}
    if chosen.random() < 0.7:
        low = chosen.randrange(3)
        schema |= {"minItems": low, "maxItems": low + chosen.randrange(3)}
    if chosen.random() < 0.2:
        schema["prefixItems"] = [_schema(chosen, 0), _schema(chosen, 0)]
    if chosen.random() < 0.05:
        schema["uniqueItems"] = True
    return schema


def _any_of(chosen: random.Random, depth: int) -> Schema:
    name = chosen.choice(("anyOf", "anyOf", "oneOf", "allOf"))
    parts = [_schema(chosen, depth - 1) for _ in range(chosen.randrange(1, 4))]
    return {name: parts[:1] if name == "allOf" else parts}
