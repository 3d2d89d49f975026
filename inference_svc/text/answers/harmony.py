"""gpt-oss: messages to channels. Thoughts are in one, calls name their tool as its recipient."""

from __future__ import annotations

import re
from collections.abc import Callable

from inference_svc.text.answers.scanner import Reading, Scanner
from inference_svc.text.answers.syntax import CallForm, CallFrame, CallSyntax, Thoughts, say_all
from inference_svc.text.chat import Tool

START, CHANNEL, MESSAGE, END, CALL = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
)
SEPARATOR = "\n\n"
"""Between two messages of text, or of thoughts."""
RETURN, CONSTRAIN = "<|return|>", "<|constrain|>"
THOUGHTS = Thoughts(f"{CHANNEL}analysis{MESSAGE}", END)
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class _Messages:
    """Adds messages to one text, apart from each other. One without text adds nothing."""

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add
        self._separator = ""
        self._has_text = False

    def begin(self) -> None:
        self._separator = SEPARATOR if self._has_text else ""

    def add(self, text: str) -> None:
        if text:
            self._add(self._separator + text)
            self._separator, self._has_text = "", True


class Harmony(CallSyntax):
    """A message without a header, such as one that the prompt has begun, is the answer's text."""

    name = "harmony"
    begins = (CHANNEL,)
    specials = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
    frame = CallFrame()
    next_begin = f"{START}assistant"
    text_begin = f"{CHANNEL}final{MESSAGE}"

    def fits(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def form(self, tool: Tool) -> CallForm:
        begin = f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}"
        return CallForm(begin, tool.schema, CALL)

    def read_answer(
        self,
        scanner: Scanner,
        thoughts: Thoughts | None,
        *,
        starts_thinking: bool,
        calls: bool,
        has_form: bool,
    ) -> Reading[None]:
        if thoughts is None and not calls:
            yield from say_all(scanner)
            scanner.finish()
            return
        texts, thought = _Messages(scanner.say), _Messages(scanner.think)
        while (yield from scanner.peek()):
            header = yield from self._read_header(scanner)
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            if recipient and calls:
                scanner.begin_call(recipient[1])
                is_whole = yield from self._read_body(scanner, scanner.argue)
                scanner.end_call(is_whole=is_whole)
                continue
            is_thought = channel is not None and channel[1] == "analysis"
            messages = thought if is_thought else texts
            messages.begin()
            yield from self._read_body(scanner, messages.add)
            if is_thought:
                scanner.drop_space()
        scanner.finish()

    def _read_header(self, scanner: Scanner) -> Reading[str]:
        """Returns the text before a message; "" for text that has no header, and for a header that
        the answer ends in."""
        for begin in (CHANNEL, START, " to="):
            if (yield from scanner.accept(begin)):
                header, marker = yield from scanner.collect((MESSAGE,))
                return begin + header if marker else ""
        return ""

    def _read_body(self, scanner: Scanner, add: Callable[[str], None]) -> Reading[bool]:
        """Returns whether the message ends before the answer."""
        stop = yield from scanner.until_stop(_ENDS, add)
        if stop in (END, CALL, RETURN):
            yield from scanner.accept(stop)
        return bool(stop)
