"""Granite 3: a list of JSON objects after a marker."""

from __future__ import annotations

from inference_svc.text.answers.json_calls import read_calls
from inference_svc.text.answers.scanner import Reading, Scanner
from inference_svc.text.answers.syntax import CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

SPECIAL, BEGIN, END = "<|tool_call|>", "<tool_call>", "</tool_call>"


class Granite(CallSyntax):
    """Version 3.3 also has its thoughts and its response in tags."""

    name = "granite"
    begins = (SPECIAL, BEGIN)
    silent = ("<response>", "</response>")
    specials = (SPECIAL, BEGIN, END)
    frame = CallFrame(f"{SPECIAL}[", ", ", "]")

    def fits(self, template: str) -> bool:
        return "<|start_of_role|>" in template and SPECIAL in template

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        if not (yield from read_calls(scanner, (END, SPECIAL))):
            return False
        yield from scanner.accept_end(END)
        return True

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f'{{"name": "{tool.name}", "arguments": ', tool.schema, "}")
