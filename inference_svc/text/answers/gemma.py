"""FunctionGemma and Gemma 4: a name and arguments, whose strings stand between markers."""

from __future__ import annotations

import json

from inference_svc.text.answers.scanner import (
    MAX_NAME_CHARS,
    SPACE,
    Reading,
    Scanner,
    parsed_json,
)
from inference_svc.text.answers.syntax import ArgumentMarks, CallForm, CallFrame, CallSyntax
from inference_svc.text.chat import Tool

_STRUCTURE = ("{", "}", "[", "]", ",", ":")


def frame_of(quote: str) -> CallFrame:
    marks = ArgumentMarks(key_end=":", begin="{", separator=",", end="}", quote=quote)
    return CallFrame(separator="", arguments=marks)


class Gemma(CallSyntax):
    """call:name{key:value,...}. Keys have no quotes, and words that are no JSON are strings."""

    name = "gemma"
    begin = "<|tool_call>"
    end = "<tool_call|>"
    quote = '<|"|>'
    begins = (begin,)
    specials = (begin, end, quote)
    frame = frame_of(quote)

    def fits(self, template: str) -> bool:
        return self.begin in template

    def form(self, tool: Tool) -> CallForm:
        return CallForm(f"{self.begin}call:{tool.name}", tool.schema, self.end)

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        yield from scanner.skip_space()
        if not (yield from scanner.accept("call:")):
            return False
        name, marker = yield from scanner.short_text(("{", self.end), MAX_NAME_CHARS)
        if not name.strip(SPACE) or marker != "{":
            return False
        scanner.forget()
        scanner.begin_call(name.strip(SPACE))
        yield from _Object(scanner, self.quote, self.end).read()
        yield from scanner.skip_space()
        rest, _ = yield from scanner.collect((self.end,))
        scanner.argue(rest.rstrip(SPACE))
        scanner.end_call()
        return True


class FunctionGemma(Gemma):
    name = "function_gemma"
    begin = "<start_function_call>"
    end = "<end_function_call>"
    quote = "<escape>"
    begins = (begin,)
    specials = (begin, end, quote)
    frame = frame_of(quote)


class _Object:
    """Arguments, written as JSON while they are read."""

    def __init__(self, scanner: Scanner, quote: str, end: str) -> None:
        self._scanner = scanner
        self._quote = quote
        self._stops = (*_STRUCTURE, quote, end)
        self._depth: list[str] = []

    def read(self) -> Reading[None]:
        """Reads up to the bracket that closes the first one, or to the end of the call."""
        scanner = self._scanner
        while True:
            words: list[str] = []
            stop = yield from scanner.until_stop(self._stops, words.append)
            word = "".join(words).strip(SPACE)
            if stop == self._quote:
                scanner.argue(word)  # a word before a string is no JSON, and is said to be none
                yield from scanner.accept(stop)
                text, _ = yield from scanner.collect((self._quote,))
                scanner.argue(json.dumps(text, ensure_ascii=False))
                continue
            scanner.argue(self._written(word, stop))
            if stop not in _STRUCTURE:
                return
            yield from scanner.accept(stop)
            scanner.argue(stop)
            if self._is_over(stop):
                return

    def _is_over(self, bracket: str) -> bool:
        if bracket in "{[":
            self._depth.append(bracket)
        elif bracket in "}]":
            self._depth.pop()
        return not self._depth

    def _written(self, word: str, stop: str) -> str:
        """Returns a key, or a value without quotes."""
        if not word:
            return ""
        if stop != ":" or self._depth[-1:] != ["{"]:
            try:
                parsed_json(word)
            except (ValueError, RecursionError):
                pass
            else:
                return word
        return json.dumps(word, ensure_ascii=False)
