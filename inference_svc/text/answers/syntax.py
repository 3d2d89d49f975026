"""The syntax of a family's answers: of its calls of tools, and of its thoughts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from inference_svc.text.answers.scanner import Reading, Scanner
from inference_svc.text.chat import Tool


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The markers around thoughts, with which an answer begins."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ArgumentMarks:
    """The texts around arguments that come one by one; see `grammars.arguments.ArgumentStyle`."""

    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""
    quote: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call that a grammar can make the model write: `begin`, arguments that match the `schema`,
    and `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The text around all calls of an answer, and between two of them; with `separator` None there
    is one call. `arguments` are the marks around arguments that are no JSON. With `is_json` a call
    is a JSON object and nothing else."""

    begin: str = ""
    separator: str | None = None
    end: str = ""
    arguments: ArgumentMarks | None = None
    is_json: bool = False


class CallSyntax:
    """One family's calls; each family is a module. `begins` are the markers with which calls begin,
    `silent` ones are no part of the text, and `specials` may be special tokens, whose text is then
    shown to the scanner. With `is_whole` an answer may be a call from its first character on.
    `next_begin` comes after thoughts, and `text_begin` then before the text of an answer."""

    name: ClassVar[str]
    begins: ClassVar[tuple[str, ...]]
    silent: ClassVar[tuple[str, ...]] = ()
    specials: ClassVar[tuple[str, ...]] = ()
    is_whole: ClassVar[bool] = False
    frame: ClassVar[CallFrame]
    next_begin: ClassVar[str] = ""
    text_begin: ClassVar[str] = ""

    def fits(self, template: str) -> bool:
        """Returns whether a chat template teaches this syntax."""
        raise NotImplementedError

    def read(self, scanner: Scanner, begin: str) -> Reading[bool]:
        """Reads calls after a marker. Returns False where there is none; the scanner has then kept
        the text from the marker on."""
        raise NotImplementedError

    def form(self, tool: Tool) -> CallForm:
        """Returns a call within the frame."""
        raise NotImplementedError

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def read_answer(
        self,
        scanner: Scanner,
        thoughts: Thoughts | None,
        *,
        starts_thinking: bool,
        calls: bool,
        has_form: bool,
    ) -> Reading[None]:
        """Reads a whole answer. With `thoughts` None they are not looked for, and so are calls
        without `calls`. With `has_form` it has calls from its first character on, or none: markers
        within a text that has a form are a part of that."""
        if thoughts is not None:
            yield from read_thoughts(scanner, thoughts, starts_thinking=starts_thinking)
        begins = self.begins if calls else ()
        markers = begins + self.silent
        begin = ""
        if calls and self.is_whole:
            yield from self._read_calls(scanner, "")
        if has_form and not (yield from self._begins_calls(scanner)):
            begins, markers = (), self.silent
        while markers:
            begin = yield from scanner.until(markers, scanner.say)
            if begin in begins:
                yield from self._read_calls(scanner, begin)
            elif not begin:
                break
        else:
            yield from say_all(scanner)
        scanner.finish()

    def _begins_calls(self, scanner: Scanner) -> Reading[bool]:
        """Returns whether calls come next, or have been read."""
        if scanner.num_calls:
            return True
        for begin in self.begins:
            if (yield from scanner.is_next(begin)):
                return True
        return False

    def _read_calls(self, scanner: Scanner, begin: str) -> Reading[None]:
        scanner.keep(begin)
        if (yield from self.read(scanner, begin)):
            scanner.forget()
            yield from scanner.skip_space()
        else:
            scanner.say_kept()


def read_thoughts(scanner: Scanner, thoughts: Thoughts, *, starts_thinking: bool) -> Reading[None]:
    """Reads the thoughts with which an answer begins, if it does. With `starts_thinking` the prompt
    has the marker before them. Thoughts that are a part of the text keep their markers and space.
    """
    scanner.keep("")
    yield from scanner.skip_space()
    if not (yield from scanner.accept(thoughts.begin)) and not starts_thinking:
        scanner.say_kept()
        return
    if not scanner.apart:
        scanner.say_kept()
        yield from _say_thoughts(scanner, thoughts.end)
        return
    scanner.forget()
    yield from scanner.skip_space()
    yield from scanner.until((thoughts.end,), scanner.think)
    scanner.drop_space()
    yield from scanner.skip_space()


def _say_thoughts(scanner: Scanner, end: str) -> Reading[None]:
    """Says thoughts up to the marker after them, and that with the space behind it."""
    yield from scanner.until_stop((end,), scanner.say)
    scanner.keep("")
    yield from scanner.accept(end)
    yield from scanner.skip_space()
    scanner.say_kept()


def say_all(scanner: Scanner) -> Reading[None]:
    """Says the rest of the answer."""
    while (yield from scanner.peek()):
        scanner.say_rest()
