"""Functions and the right calls of them, from the Berkeley Function Calling Leaderboard.

`python -m tests.inference_svc.text.answers.bfcl WHEEL` writes the sample anew, out of a wheel of
`bfcl-eval` (`pip download --no-deps bfcl-eval`).
"""

from __future__ import annotations

import json
import random
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from inference_svc.text.chat import Tool
from tests.inference_svc.text.answers.written import Call

SAMPLE = Path(__file__).parents[3] / "data" / "bfcl" / "cases.jsonl"
DATA = "bfcl_eval/data"
COUNTS = {
    "simple_python": 10,
    "simple_java": 8,
    "simple_javascript": 8,
    "multiple": 10,
    "parallel": 16,
    "parallel_multiple": 20,
    "live_simple": 10,
    "live_multiple": 8,
    "live_parallel": 6,
    "live_parallel_multiple": 4,
}
TYPES = {
    "dict": "object",
    "hashmap": "object",
    "object": "object",
    "boolean": "boolean",
    "integer": "integer",
    "long": "integer",
    "short": "integer",
    "byte": "integer",
    "float": "number",
    "double": "number",
    "number": "number",
    "bigint": "integer",
    "tuple": "array",
    "list": "array",
    "arraylist": "array",
    "array": "array",
    "set": "array",
    "string": "string",
    "char": "string",
    "any": "string",
}
"""JSON's types, by the names that the cases have for those of Python, Java and JavaScript."""


class Case(NamedTuple):
    name: str
    tools: tuple[Tool, ...]
    calls: list[Call]


def cases() -> list[Case]:
    return [Case(*_read(json.loads(line))) for line in SAMPLE.read_text("utf-8").splitlines()]


def _read(found: dict[str, Any]) -> tuple[str, tuple[Tool, ...], list[Call]]:
    tools = tuple(Tool(name, "", json.dumps(schema)) for name, schema in found["tools"].items())
    return found["id"], tools, [(name, arguments) for name, arguments in found["calls"]]


def sampled(wheel: Path) -> Iterator[str]:
    """Yields a line of each chosen case. Descriptions are left out, and values that may also be
    another, or absent."""
    chosen = random.Random(48)
    with zipfile.ZipFile(wheel) as archive:
        for kind, count in COUNTS.items():
            lines = _lines(archive, f"BFCL_v4_{kind}.json")
            answers = _lines(archive, f"possible_answer/BFCL_v4_{kind}.json")
            found = [
                each
                for line, answer in zip(lines, answers, strict=True)
                if (each := _case(line, answer))
            ]
            for case in chosen.sample(found, count):
                yield json.dumps(case, ensure_ascii=False, separators=(",", ":"))


def _lines(archive: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(f"{DATA}/{name}").splitlines()]


def _case(line: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Returns {} for calls that do not match their function's own schema."""
    assert line["id"] == answer["id"]
    tools = {each["name"]: _schema(each["parameters"]) for each in line["function"]}
    calls = []
    for called in answer["ground_truth"]:
        [(name, options)] = called.items()
        arguments = _arguments(options)
        if not jsonschema.Draft202012Validator(tools[name]).is_valid(arguments):
            return {}
        calls.append([name, arguments])
    return {"id": line["id"], "tools": tools, "calls": calls}


def _schema(found: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if found.get("type"):
        schema["type"] = TYPES[found["type"].lower()]
    if "properties" in found:
        schema["properties"] = {key: _schema(each) for key, each in found["properties"].items()}
    if "items" in found:
        schema["items"] = _schema(found["items"])
    return schema


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first of the allowed values; "" says that an argument may be absent."""
    return {
        key: _value(next(each for each in allowed if each != ""))
        for key, allowed in options.items()
        if isinstance(allowed, list) and any(each != "" for each in allowed)
    }


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return _arguments(value)
    return [_value(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    SAMPLE.write_text("".join(f"{line}\n" for line in sampled(Path(sys.argv[1]))), "utf-8")
