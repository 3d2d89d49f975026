"""Command R, R7B and A: a list of JSON objects between markers, or in a block of code."""

from __future__ import annotations

from inference_svc.text.answers.json_calls import Keys, read_calls
from inference_svc.text.answers.scanner import Reading, Scanner
from inference_svc.text.answers.syntax import CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
OLD_BEGIN, OLD_END = "Action: ```json", "```"
KEYS = Keys(("tool_name",), ("parameters",))


class CommandR(CallSyntax):
    name = "command_r"
    begins = (BEGIN, OLD_BEGIN)
    silent = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    specials = (BEGIN, END, *silent)
    frame = CallFrame(f"{BEGIN}[", ", ", f"]{END}")

    def fits(self, template: str) -> bool:
        return BEGIN in template or "Write 'Action:'" in template

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        end = END if begin == BEGIN else OLD_END
        if not (yield from read_calls(scanner, (end,), KEYS, only_tools=begin != BEGIN)):
            return False
        yield from scanner.accept_end(end)
        return True

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f'{{"tool_name": "{tool.name}", "parameters": ', tool.schema, "}")
