"""A conversation's form for a chat template: the roles that the template knows, its system messages
in a place that the template accepts, and a check that the prompt has every instruction.

Templates drop silently: most have a branch for each role that they know and none for others, and
some look at the first message only.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence

from jinja2 import nodes

from inference_svc.text.prompt import ChatMessage
from servicekit.errors import InvalidArgument

SYSTEM, DEVELOPER, ASSISTANT = "system", "developer", "assistant"
ROLES = (DEVELOPER, SYSTEM, "user", ASSISTANT)
"""Roles of every chat. Others, such as OpenAI's function, are for templates that name them."""
TOOL = "tool"
"""A role that many templates take without naming it: they write any role."""
SEPARATOR = "\n\n"
"""Between the texts of system messages that are joined."""
MAX_ROLE_CHARS = 64
"""The most of a role that an error quotes."""
MIN_CERTAIN_CHARS = 16
"""A shorter text may be in a prompt by chance."""
MARKS_CHARS = 64
"""The most that the marks of a message have, with what a template makes of them."""
_ADVICE = "put its text into the first user message"
_PATH = "messages[{0}].{1}"


def field_error(index: int, field: str, text: str) -> InvalidArgument:
    """Returns an error about a field of a message. In its text the field has its short path, which
    callers of both transports know."""
    path = _PATH.format(index, field)
    return InvalidArgument(f"{path}: {text}", subject=f"chat.{path}")


def named_texts(template: nodes.Template) -> frozenset[str]:
    """Returns the texts that a template compares others with, or looks up: among them the roles
    that it knows."""
    found = set()
    for kind in (nodes.Compare, nodes.Test, nodes.List, nodes.Tuple, nodes.Pair):
        for node in template.find_all(kind):
            found |= _texts(node.key if isinstance(node, nodes.Pair) else node)
    return frozenset(found)


def _texts(node: nodes.Node) -> set[str]:
    """Returns the texts in an expression, except for the names of attributes."""
    if isinstance(node, nodes.Const):
        return {node.value} if isinstance(node.value, str) else set()
    children = [node.node] if isinstance(node, nodes.Getitem) else node.iter_child_nodes()
    return {text for child in children for text in _texts(child)}


def forms(messages: Sequence[ChatMessage], named: frozenset[str]) -> Iterator[list[ChatMessage]]:
    """Yields the conversation as it is, and then others for templates that refuse it or leave out a
    part: with developers' messages as the system's, which is the first one for a template that does
    not know the role, and with all of these as one at the begin. Raises InvalidArgument for a role
    that the template does not know."""
    for index, message in enumerate(messages):
        if message.role not in (*ROLES, TOOL) and message.role not in named:
            raise field_error(
                index,
                "role",
                f"the chat template does not know the role {message.role[:MAX_ROLE_CHARS]!r}: use "
                f"{', '.join(ROLES[:-1])} or {ROLES[-1]}",
            )
    as_system = [
        ChatMessage(SYSTEM, each.content) if each.role == DEVELOPER else each for each in messages
    ]
    own = list(messages) if DEVELOPER in named else as_system
    found = [own, as_system, _joined(as_system), _joined(own)]
    yield from (form for index, form in enumerate(found) if form not in found[:index])


def _joined(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages with the system's and developers' as one at the begin."""
    leading = [each for each in messages if each.role in (SYSTEM, DEVELOPER)]
    if not leading:
        return list(messages)
    text = SEPARATOR.join(each.content for each in leading)
    rest = [each for each in messages if each.role not in (SYSTEM, DEVELOPER)]
    return [ChatMessage(leading[0].role, text), *rest]


class Marks:
    """Numbers around the texts of messages, by which they are found in a prompt. Templates may trim
    a text or replace parts of it, but they leave digits alone."""

    def __init__(self) -> None:
        self._base = f"{secrets.randbelow(10**12):012}"

    def around(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns the messages with marks at both ends of their texts."""
        return [
            ChatMessage(each.role, f"{self._at(index, 0)} {each.content} {self._at(index, 1)}")
            if _is_checked(each)
            else each
            for index, each in enumerate(messages)
        ]

    def missing(self, messages: Sequence[ChatMessage], prompt: str) -> int | None:
        """Returns the index of the first message of which a prompt of marked messages lacks an
        end."""
        found = set(re.findall(self._base + r"\d{7}", prompt))
        for index, each in enumerate(messages):
            if _is_checked(each) and not {self._at(index, 0), self._at(index, 1)} <= found:
                return index
        return None

    def _at(self, index: int, end: int) -> str:
        return f"{self._base}{index:06}{end}"


def is_certain(messages: Sequence[ChatMessage], prompt: str) -> bool:
    """Returns whether a prompt has the texts of all messages, one after the other, and none that
    could be there by chance."""
    place = 0
    for each in filter(_is_checked, messages):
        text = each.content.strip()
        start = prompt.find(text, place) if len(text) >= MIN_CERTAIN_CHARS else -1
        if start < 0:
            return False
        place = start + len(text)
    return True


def _is_checked(message: ChatMessage) -> bool:
    """Templates may leave out an earlier answer, or its thoughts, as the model was trained."""
    return message.role != ASSISTANT and not message.content.isspace() and bool(message.content)


def refused(messages: Sequence[ChatMessage], error: Exception) -> InvalidArgument:
    """Returns the error for messages that the template refuses."""
    advice = ""
    if any(each.role == SYSTEM for each in messages):
        advice = f" (if it takes no {SYSTEM} message, {_ADVICE})"
    return InvalidArgument(
        f"the chat template refuses these messages: {error}{advice}", subject="chat"
    )


def left_out(index: int, message: ChatMessage) -> InvalidArgument:
    """Returns the error for a message that is not in the prompt."""
    return field_error(
        index,
        "content",
        f"the chat template leaves this {message.role} message out of the prompt, or a part of it; "
        f"{_ADVICE}",
    )
