"""Mistral: a list of JSON objects after a marker, or since tokenizer version 11 names and arguments
between markers."""

from __future__ import annotations

import secrets
import string

from inference_svc.text.answers.json_calls import read_calls
from inference_svc.text.answers.scanner import MAX_NAME_CHARS, SPACE, Reading, Scanner
from inference_svc.text.answers.syntax import CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_CHARS = 9
"""Templates refuse ids of another length, and other characters than letters and digits."""
_ALPHABET = string.ascii_letters + string.digits


class Mistral(CallSyntax):
    name = "mistral"
    begins = (BEGIN,)
    specials = (BEGIN, CALL_ID, ARGUMENTS)
    frame = CallFrame(f"{BEGIN} [", ", ", "]")

    def fits(self, template: str) -> bool:
        return BEGIN in template

    def new_id(self) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        if (yield from scanner.skip_space()) in ("[", "{"):
            return (yield from read_calls(scanner, (BEGIN,)))
        markers = (CALL_ID, ARGUMENTS, "{")
        name, marker = yield from scanner.short_text(markers, MAX_NAME_CHARS)
        if marker == CALL_ID:
            yield from scanner.accept(CALL_ID)
            _, marker = yield from scanner.short_text((ARGUMENTS, "{"), MAX_NAME_CHARS)
        if marker == ARGUMENTS:
            yield from scanner.accept(ARGUMENTS)
        if not marker or not name.strip(SPACE):
            return False
        scanner.forget()
        scanner.begin_call(name.strip(SPACE))
        yield from scanner.value(scanner.argue, (BEGIN,))
        scanner.end_call()
        return True

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f'{{"name": "{tool.name}", "arguments": ', tool.schema, "}")
