"""Phi-4-mini: a list of JSON objects between markers, or after a word."""

from __future__ import annotations

from inference_svc.text.answers.json_calls import read_calls, read_rest
from inference_svc.text.answers.scanner import Reading, Scanner
from inference_svc.text.answers.syntax import CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

BEGIN, END, WORD = "<|tool_call|>", "<|/tool_call|>", "functools["


class Phi(CallSyntax):
    name = "phi"
    begins = (BEGIN, WORD)
    specials = (BEGIN, END)
    frame = CallFrame(f"{BEGIN}[", ", ", f"]{END}")

    def fits(self, template: str) -> bool:
        return "<|tool|>" in template or WORD in template

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        reading = read_rest if begin == WORD else read_calls
        if not (yield from reading(scanner, (END,))):
            return False
        yield from scanner.accept_end(END)
        return True

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f'{{"name": "{tool.name}", "arguments": ', tool.schema, "}")
