"""GLM 4.5 and later, Qwen3-Coder and Qwen 3.5: each argument in tags of its own."""

from __future__ import annotations

import json
from typing import Any

from inference_svc.grammars.arguments import is_text
from inference_svc.text.answers.scanner import (
    MAX_NAME_CHARS,
    SPACE,
    Reading,
    Scanner,
    parsed_json,
)
from inference_svc.text.answers.syntax import ArgumentMarks, CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

BEGIN, END = "<tool_call>", "</tool_call>"


class Glm(CallSyntax):
    """The name, then <arg_key> and <arg_value> for each argument."""

    name = "glm"
    begins = (BEGIN,)
    specials = (BEGIN, END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    frame = CallFrame(
        separator="\n",
        arguments=ArgumentMarks("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    )

    def fits(self, template: str) -> bool:
        return "<arg_key>" in template

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f"{BEGIN}{tool.name}\n", tool.schema, END)

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        name, marker = yield from scanner.short_text(("<arg_key>", END), MAX_NAME_CHARS)
        name = name.strip(SPACE)
        if not name or not marker or "<" in name or "{" in name:
            return False
        arguments = Arguments(scanner, name)
        while (yield from scanner.accept("<arg_key>")):
            key, _ = yield from scanner.collect(("</arg_key>",))
            yield from scanner.skip_space()
            yield from scanner.accept("<arg_value>")
            value, _ = yield from scanner.collect(("</arg_value>",))
            arguments.add(key.strip(SPACE), value)
            yield from scanner.skip_space()
        yield from arguments.end(END)
        return True


class QwenCoder(CallSyntax):
    """<function=name>, then <parameter=key> for each argument, whose value has lines of its own."""

    name = "qwen_coder"
    begins = (BEGIN,)
    specials = (BEGIN, END)
    frame = CallFrame(
        separator="\n", arguments=ArgumentMarks("<parameter=", ">\n", "\n</parameter>\n")
    )

    def fits(self, template: str) -> bool:
        return "<function=" in template and BEGIN in template

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f"{BEGIN}\n<function={tool.name}>\n", tool.schema, f"</function>\n{END}")

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        yield from scanner.skip_space()
        if not (yield from scanner.accept("<function=")):
            return False
        name, marker = yield from scanner.short_text((">", "\n"), MAX_NAME_CHARS)
        if not name.strip(SPACE) or marker != ">":
            return False
        yield from scanner.accept(">")
        arguments = Arguments(scanner, name.strip(SPACE))
        yield from scanner.skip_space()
        while (yield from scanner.accept("<parameter=")):
            key, _ = yield from scanner.collect((">",))
            value, _ = yield from scanner.collect(("</parameter>",))
            arguments.add(key.strip(SPACE), value.removeprefix("\n").removesuffix("\n"))
            yield from scanner.skip_space()
        is_whole = yield from scanner.accept("</function>")
        yield from arguments.end(END, is_whole=is_whole)
        return True


class Arguments:
    """A call's arguments, which come one by one as texts, as a JSON object. A text is a string
    where the tool's schema has no other type, or its value is no JSON."""

    def __init__(self, scanner: Scanner, name: str) -> None:
        scanner.forget()
        scanner.begin_call(name)
        self._scanner = scanner
        tool = scanner.tools.get(name)
        properties = {} if tool is None else tool.schema.get("properties", {})
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._num_added = 0

    def add(self, key: str, value: str) -> None:
        text = _to_json(value, self._properties.get(key))
        begin = ", " if self._num_added else "{"
        self._scanner.argue(f"{begin}{json.dumps(key, ensure_ascii=False)}: {text}")
        self._num_added += 1

    def end(self, end: str, *, is_whole: bool = False) -> Reading[None]:
        """Ends the call; text before its end is no argument, and the arguments are then no JSON. So
        are the arguments of a call that neither `is_whole` nor has its end: more may be missing."""
        yield from self._scanner.skip_space()
        rest, marker = yield from self._scanner.collect((end,))
        if not marker and end.startswith(rest):
            rest = ""  # the answer ends within the marker
        is_whole = is_whole or bool(marker)
        if is_whole and self._num_added:
            self._scanner.argue("}")
        self._scanner.argue(rest.rstrip(SPACE))
        self._scanner.end_call(is_whole=is_whole)


def _to_json(value: str, schema: Any) -> str:
    if not is_text(schema):
        try:
            parsed_json(value)
        except (ValueError, RecursionError):
            pass
        else:
            return value.strip(SPACE)
    return json.dumps(value, ensure_ascii=False)
