"""Calls as JSON objects, which most families write: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from inference_svc.text.answers.scanner import SPACE, Reading, Scanner


class Keys(NamedTuple):
    """The names of a call's members; the others, such as ids, have no meaning here."""

    names: Collection[str] = ("name",)
    arguments: Collection[str] = ("arguments", "parameters")


KEYS = Keys()


def read_object(
    scanner: Scanner, stops: tuple[str, ...], keys: Keys = KEYS, *, only_tools: bool = False
) -> Reading[bool]:
    """Reads a call. Returns False where there is none: the syntax says what it has kept. A call
    whose name is known is one, whatever its arguments are; with `only_tools` the name is one of the
    tools'."""
    yield from scanner.skip_space()
    if not (yield from scanner.accept("{")):
        return False
    call = _Call(scanner, stops, keys, only_tools=only_tools)
    is_whole = yield from call.read_members()
    if not call.name:
        return False
    if not call.has_begun:
        call.begin()
    if not is_whole and (yield from scanner.skip_space()):
        # The rest, up to the end of the call, belongs to no object.
        rest: list[str] = []
        yield from scanner.until_stop(stops, rest.append)
        scanner.argue("".join(rest).rstrip(SPACE))
    scanner.end_call(is_whole=is_whole)
    return True


def read_calls(
    scanner: Scanner, stops: tuple[str, ...], keys: Keys = KEYS, *, only_tools: bool = False
) -> Reading[bool]:
    """Reads a list of calls, or a single one. Returns False where there is none."""
    if (yield from scanner.skip_space()) != "[":
        return (yield from read_object(scanner, stops, keys, only_tools=only_tools))
    yield from scanner.accept("[")
    return (yield from read_rest(scanner, stops, keys))


def read_rest(scanner: Scanner, stops: tuple[str, ...], keys: Keys = KEYS) -> Reading[bool]:
    """Reads a list of calls after its bracket; says what is none after others."""
    yield from scanner.skip_space()
    if (yield from scanner.accept("]")):
        scanner.forget()
        return True
    has_calls = False
    while (yield from read_object(scanner, stops, keys)):
        has_calls = True
        scanner.keep("")
        yield from scanner.skip_space()
        if not (yield from scanner.accept(",")):
            yield from scanner.accept("]")
            scanner.forget()
            return True
    if has_calls:
        scanner.say_kept()
    return has_calls


class _Call:
    """The members of one call's object, in any order."""

    def __init__(
        self, scanner: Scanner, stops: tuple[str, ...], keys: Keys, *, only_tools: bool
    ) -> None:
        self.name = ""
        self.has_begun = False
        self._scanner = scanner
        self._stops = stops
        self._keys = keys
        self._only_tools = only_tools
        self._early: list[str] = []
        """Arguments that come before the name."""

    def begin(self) -> None:
        self._scanner.forget()
        self._scanner.begin_call(self.name)
        self.has_begun = True
        self._scanner.argue("".join(self._early))

    def read_members(self) -> Reading[bool]:
        """Returns whether the object ends as it should."""
        scanner = self._scanner
        while True:
            yield from scanner.skip_space()
            if (yield from scanner.accept("}")):
                return True
            key = yield from scanner.string()
            if key is None:
                return False
            yield from scanner.skip_space()
            if not (yield from scanner.accept(":")):
                return False
            if not (yield from self._read_member(key)):
                return False
            yield from scanner.skip_space()
            if not (yield from scanner.accept(",")):
                return (yield from scanner.accept("}"))

    def _read_member(self, key: str) -> Reading[bool]:
        scanner = self._scanner
        if key in self._keys.names and not self.name:
            yield from scanner.skip_space()
            name = yield from scanner.string()
            if not name or (self._only_tools and name not in scanner.tools):
                return False
            self.name = name
            return True
        if key not in self._keys.arguments or self.has_begun or self._early:
            return (yield from scanner.value(lambda text: None, self._stops))
        if not self.name:
            return (yield from scanner.value(self._early.append, self._stops))
        self.begin()
        return (yield from scanner.value(scanner.argue, self._stops))
