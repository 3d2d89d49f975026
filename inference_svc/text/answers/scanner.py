"""Reads an answer as its text comes: the parts that it finds do not depend on how the text is cut.

A syntax is a generator that yields where it needs more text, and whose decisions depend only on the
text. It takes time in proportion to the text: the scanner keeps no more of it than a marker may
have, unless a syntax asks it to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

from inference_svc.text.chat import Tool

T = TypeVar("T")

Reading: TypeAlias = Generator[None, None, T]
"""Reads a part of an answer, and yields where it needs more text."""

SPACE = " \t\r\n"
MAX_SPACE = 16
"""The most space at the end of a text that is left out before a call, and after thoughts."""
MAX_NAME_CHARS = 256
"""The longest name of a tool that an answer may call."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the answer's own text."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the thoughts before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call: the first one has its name and id, all have more of its arguments, and the
    last one may have an error, which tells why the arguments are no JSON object."""

    index: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    error: str = ""


Piece: TypeAlias = Said | Thought | CallPiece


def parsed_json(text: str) -> Any:
    """Raises ValueError for a text that is no JSON, such as NaN, and RecursionError."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def arguments_error(arguments: str) -> str:
    """Returns why the arguments of a call are no JSON object; "" if they are one."""
    try:
        found = parsed_json(arguments)
    except RecursionError:
        return "the arguments are nested too deeply"
    except ValueError as error:
        return f"the arguments are no JSON: {error}"
    return "" if isinstance(found, dict) else "the arguments are JSON, but no object"


class Answer:
    """The pieces that a syntax has found. `tools` are the ones that the answer may call, by their
    names; calls after the first `max_calls` are left out (0: none is). `new_id` makes ids of
    calls. Thoughts are a part of the text unless they are `apart`."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        new_id: Callable[[], str],
        max_calls: int = 0,
        *,
        apart: bool = True,
    ) -> None:
        self.tools = tools
        self.apart = apart
        self.num_calls = 0
        self._new_id = new_id
        self._max_calls = max_calls
        self._pieces: list[Piece] = []
        self._space = ""
        self._arguments: list[str] = []

    def pop_pieces(self) -> list[Piece]:
        """Returns the pieces since the last call; neighbours of one kind are one."""
        found: list[Piece] = []
        for piece in self._pieces:
            last = found[-1] if found else None
            if isinstance(piece, Said | Thought) and isinstance(last, type(piece)):
                found[-1] = replace(last, text=last.text + piece.text)
            elif isinstance(piece, CallPiece) and not piece.name and _continues(last, piece):
                assert isinstance(last, CallPiece)
                joined = last.arguments + piece.arguments
                found[-1] = replace(last, arguments=joined, error=piece.error)
            else:
                found.append(piece)
        self._pieces.clear()
        return found

    def say(self, text: str) -> None:
        self._add(text, Said)

    def think(self, text: str) -> None:
        self._add(text, Thought if self.apart else Said)

    def _add(self, text: str, kind: type[Said | Thought]) -> None:
        """Holds the space at the end back: a call, or the end of the thoughts, leaves it out."""
        text = self._space + text
        num_space = min(len(text) - len(text.rstrip(SPACE)), MAX_SPACE)
        self._space = text[len(text) - num_space :]
        if len(text) > num_space:
            self._pieces.append(kind(text[: len(text) - num_space]))

    def drop_space(self) -> None:
        """Leaves out the space with which the text so far ends."""
        self._space = ""

    def finish(self) -> None:
        """Says the space that an answer without calls ends with."""
        if self._space and not self.num_calls:
            self._pieces.append(Said(self._space))
        self._space = ""

    def begin_call(self, name: str) -> None:
        self.drop_space()
        self._arguments.clear()
        if not self._is_muted:
            self._pieces.append(CallPiece(self.num_calls, name, self._new_id()))

    def argue(self, text: str) -> None:
        """Adds to the arguments of the call."""
        if text:
            self._arguments.append(text)
        if text and not self._is_muted:
            self._pieces.append(CallPiece(self.num_calls, arguments=text))

    def end_call(self, *, is_whole: bool = False) -> None:
        """Ends the call. One that `is_whole` and has no arguments needs none; of others the answer
        has ended before them."""
        if is_whole and not self._arguments:
            self.argue("{}")
        error = arguments_error("".join(self._arguments))
        self._arguments.clear()
        if error and not self._is_muted:
            self._pieces.append(CallPiece(self.num_calls, error=error))
        self.num_calls += 1

    @property
    def _is_muted(self) -> bool:
        return bool(self._max_calls) and self.num_calls >= self._max_calls


class Scanner(Answer):
    """The text of one answer as it comes, and its pieces."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        new_id: Callable[[], str],
        max_calls: int = 0,
        *,
        apart: bool = True,
    ) -> None:
        super().__init__(tools, new_id, max_calls, apart=apart)
        self._text, self._at = "", 0
        self._is_over = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._is_over = True

    def keep(self, text: str) -> None:
        """Keeps this and all that is read from here on, until `forget` or `say_kept`."""
        self._kept = [text]

    def forget(self) -> None:
        self._kept = None

    def say_kept(self) -> None:
        """Says all that was kept: it was no call."""
        kept, self._kept = self._kept or [], None
        self.say("".join(kept))

    def say_rest(self) -> None:
        """Says all text that is here."""
        self.say(self._take(len(self._text) - self._at))

    def until(self, markers: tuple[str, ...], add: Callable[[str], None]) -> Reading[str]:
        """Adds the text up to the first of the markers; reads and returns that, "" at the end."""
        marker = yield from self.until_stop(markers, add)
        return self._take(len(marker))

    def collect(self, markers: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """Returns the text up to the first of the markers, and that, "" at the end."""
        found: list[str] = []
        marker = yield from self.until(markers, found.append)
        return "".join(found), marker

    def short_text(self, markers: tuple[str, ...], max_chars: int) -> Reading[tuple[str, str]]:
        """Returns the text before the first of the markers, and that unread; "" for the marker at
        the end, and after so many characters."""
        pattern, longest = _pattern(markers)
        while True:
            most = self._at + max_chars + longest
            match = pattern.search(self._text, self._at, most)
            if match and match.start() - self._at <= max_chars:
                return self._take(match.start() - self._at), match.group()
            if match or self._is_over or len(self._text) >= most:
                return "", ""
            yield

    def peek(self) -> Reading[str]:
        """Returns the next character; "" at the end."""
        while self._at >= len(self._text) and not self._is_over:
            yield
        return self._text[self._at : self._at + 1]

    def skip_space(self) -> Reading[str]:
        """Reads space, and returns the character after it."""
        while (char := (yield from self.peek())) and char in SPACE:
            end = self._at
            while end < len(self._text) and self._text[end] in SPACE:
                end += 1
            self._take(end - self._at)
        return char

    def accept(self, text: str) -> Reading[bool]:
        """Reads this text, if it is the next one."""
        if (yield from self.is_next(text)):
            self._take(len(text))
            return True
        return False

    def accept_end(self, text: str) -> Reading[None]:
        """Reads this text after space, or its begin, if the answer ends within it."""
        yield from self.skip_space()
        is_there = yield from self.accept(text)
        if not is_there and self._is_over and text.startswith(self._text[self._at :]):
            self._take(len(self._text) - self._at)

    def is_next(self, text: str) -> Reading[bool]:
        """Returns whether this text is the next one."""
        while len(self._text) - self._at < len(text) and not self._is_over:
            if not text.startswith(self._text[self._at :]):
                return False
            yield
        return self._text.startswith(text, self._at)

    def until_stop(self, stops: tuple[str, ...], add: Callable[[str], None]) -> Reading[str]:
        """Adds the text before the first of the stops; returns that unread, "" at the end."""
        pattern, longest = _pattern(stops)
        while True:
            match = pattern.search(self._text, self._at)
            if match:
                add(self._take(match.start() - self._at))
                return match.group()
            num_held = 0 if self._is_over else self._num_begun(stops, longest)
            add(self._take(len(self._text) - self._at - num_held))
            if self._is_over:
                return ""
            yield

    def string(self) -> Reading[str | None]:
        """Reads a short JSON string; None if there is none."""
        if not (yield from self.accept('"')):
            return None
        raw = ['"']
        num_chars = 0
        while True:
            match = _IN_STRING.search(self._text, self._at)
            end = len(self._text) if match is None else match.start()
            num_chars += end - self._at
            raw.append(self._take(end - self._at))
            if num_chars > MAX_NAME_CHARS:
                return None
            if match is None:
                if self._is_over:
                    return None
                yield
                continue
            raw.append(self._take(1))
            if match.group() == '"':
                return _decoded("".join(raw))
            if not (yield from self.peek()):
                return None
            raw.append(self._take(1))

    def value(self, add: Callable[[str], None], stops: tuple[str, ...]) -> Reading[bool]:
        """Adds the text of a JSON value; returns whether it is complete: it may end with the
        answer, or before a stop outside of its strings. It is not checked: only brackets and quotes
        are counted."""
        if (yield from self.skip_space()) not in _OPENING:
            yield from self._scalar(add, stops)
            return True
        depth = 0
        # A marker such as [TOOL_CALLS] may be the begin of a list.
        stops = tuple(each for each in stops if each[0] not in _STRUCTURE)
        pattern, longest = _pattern((*_STRUCTURE, *stops))
        while True:
            match = pattern.search(self._text, self._at)
            if match is None:
                num_held = 0 if self._is_over else self._num_begun(stops, longest)
                add(self._take(len(self._text) - self._at - num_held))
                if self._is_over:
                    return False
                yield
                continue
            found = match.group()
            if found in stops:
                add(self._take(match.start() - self._at))
                return False
            add(self._take(match.end() - self._at))
            if found == '"' and not (yield from self._rest_of_string(add)):
                return False
            depth += (found in "{[") - (found in "}]")
            if depth == 0:
                return True

    def _rest_of_string(self, add: Callable[[str], None]) -> Reading[bool]:
        """Adds the text of a string after its first quote; returns whether it ends."""
        while True:
            match = _IN_STRING.search(self._text, self._at)
            if match is None:
                add(self._take(len(self._text) - self._at))
                if self._is_over:
                    return False
                yield
                continue
            add(self._take(match.end() - self._at))
            if match.group() == '"':
                return True
            if not (yield from self.peek()):
                return False
            add(self._take(1))

    def _scalar(self, add: Callable[[str], None], stops: tuple[str, ...]) -> Reading[None]:
        """Adds a number or a word."""
        yield from self.until_stop((*_AFTER_SCALAR, *stops), add)

    def _take(self, num_chars: int) -> str:
        text = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _num_begun(self, markers: Sequence[str], longest: int) -> int:
        """Returns the length of the longest end of the text that may become a marker."""
        start = max(self._at, len(self._text) - longest + 1)
        for place in range(start, len(self._text)):
            if any(each.startswith(self._text[place:]) for each in markers):
                return len(self._text) - place
        return 0


_OPENING = ("{", "[", '"')
_STRUCTURE = ("{", "}", "[", "]", '"')
_AFTER_SCALAR = (*SPACE, ",", "}", "]")
_IN_STRING = re.compile(r'["\\]')


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Returns a pattern of any of the markers, and the length of the longest. None of them begins
    with another."""
    for each in markers:
        assert not any(other != each and other.startswith(each) for other in markers), each
    return re.compile("|".join(map(re.escape, markers))), max(map(len, markers))


def _continues(last: Piece | None, piece: CallPiece) -> bool:
    return isinstance(last, CallPiece) and last.index == piece.index and not last.error


def _decoded(raw: str) -> str | None:
    try:
        return str(json.loads(raw))
    except ValueError:
        return None
