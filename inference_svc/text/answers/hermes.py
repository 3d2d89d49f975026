"""Qwen 2.5 and 3, Hermes, Granite 4, SmolLM3 and others: JSON in tags."""

from __future__ import annotations

from inference_svc.text.answers.json_calls import read_object
from inference_svc.text.answers.scanner import Reading, Scanner
from inference_svc.text.answers.syntax import CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(CallSyntax):
    name = "hermes"
    begins = (BEGIN,)
    specials = (BEGIN, END)
    frame = CallFrame(separator="\n")

    def fits(self, template: str) -> bool:
        return BEGIN in template

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        if not (yield from read_object(scanner, (END,))):
            return False
        yield from scanner.accept_end(END)
        return True

    def form(self, tool: Tool) -> CallForm:
        begin = f'{BEGIN}\n{{"name": "{tool.name}", "arguments": '
        return CallForm(begin, tool.schema, f"}}\n{END}")
