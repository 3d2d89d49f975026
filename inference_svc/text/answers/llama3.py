"""Llama 3.1 and later: an answer that is a JSON object, with further ones after semicolons."""

from __future__ import annotations

from inference_svc.text.answers.json_calls import read_object
from inference_svc.text.answers.scanner import Reading, Scanner
from inference_svc.text.answers.syntax import CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

BEGIN = "<|python_tag|>"


class Llama3(CallSyntax):
    """Any JSON may be an answer: a call is of a tool that the request has."""

    name = "llama3"
    begins = (BEGIN,)
    specials = (BEGIN,)
    is_whole = True
    frame = CallFrame(separator="; ", is_json=True)

    def fits(self, template: str) -> bool:
        return BEGIN in template or '"parameters": dictionary of argument name' in template

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        if not (yield from read_object(scanner, (BEGIN,), only_tools=True)):
            return False
        while True:
            scanner.keep("")
            yield from scanner.skip_space()
            if not (yield from scanner.accept(";")):
                break
            if not (yield from read_object(scanner, (BEGIN,), only_tools=True)):
                scanner.say_kept()
                break
        return True

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f'{{"name": "{tool.name}", "parameters": ', tool.schema, "}")
