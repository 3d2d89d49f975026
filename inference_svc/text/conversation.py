"""A conversation's form for a chat template: the roles that the template knows, its system messages
in a place that the template accepts, and a check that the prompt has every instruction.

Templates drop silently: most have a branch for each role that they know and none for others, and
some look at the first message only.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from jinja2 import meta, nodes

from inference_svc.text.chat import Chat, ChatMessage, Tool, ToolCall, Variable
from servicekit.errors import InvalidArgument

SYSTEM, DEVELOPER, USER, ASSISTANT = "system", "developer", "user", "assistant"
ROLES = (DEVELOPER, SYSTEM, USER, ASSISTANT)
"""Roles of every chat. Others, such as OpenAI's function, are for templates that name them."""
TOOL = "tool"
"""A role that many templates take without naming it: they write any role."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's thoughts in templates: Qwen's and GLM's, others', and gpt-oss'."""
SEPARATOR = "\n\n"
"""Between the texts of system messages that are joined."""
MAX_ROLE_CHARS = 64
"""The most of a role that an error quotes."""
MIN_CERTAIN_CHARS = 16
"""A shorter text may be in a prompt by chance."""
SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which templates begin thoughts or leave them out: Qwen's, GLM's, and Granite's."""
NO_EFFORT = "none"
NO_TOOLS = (
    "the chat template shows no tools to the model: use an adapter or a model whose template does, "
    'or tool_choice "none"'
)
MARKS_CHARS = 64
"""The most that the marks of a message or of a call have, with what a template makes of them."""
SHORT_ID_CHARS = 9
"""Mistral's templates take ids of calls with so many letters and digits, and no others."""
ARGUMENTS = "arguments"
"""The only entry of an object that is made of arguments which are none."""
_ADVICE = "put its text into the first user message"
_PATH = "messages[{0}].{1}"


def field_error(index: int, field: str, text: str) -> InvalidArgument:
    """Returns an error about a field of a message. In its text the field has its short path, which
    callers of both transports know."""
    path = _PATH.format(index, field)
    return InvalidArgument(f"{path}: {text}", subject=f"chat.{path}")


@dataclass(frozen=True, slots=True)
class TemplateNames:
    """The names in a template. `compared` are the texts that it compares others with, or looks up:
    among them the roles that it knows. `fields` are all of its texts, and the attributes that it
    reads; `variables` are its arguments."""

    compared: frozenset[str]
    fields: frozenset[str]
    variables: frozenset[str]

    @classmethod
    def of(cls, template: nodes.Template) -> TemplateNames:
        compared: set[str] = set()
        for kind in (nodes.Compare, nodes.Test, nodes.List, nodes.Tuple, nodes.Pair):
            for node in template.find_all(kind):
                compared |= _texts(node.key if isinstance(node, nodes.Pair) else node)
        fields = {node.attr for node in template.find_all(nodes.Getattr)}
        fields |= {
            node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)
        }
        variables = meta.find_undeclared_variables(template)
        return cls(frozenset(compared), frozenset(fields), frozenset(variables))

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Raises InvalidArgument for tools that the template does not know."""
        if tools and "tools" not in self.variables:
            raise InvalidArgument(f"tools: {NO_TOOLS}", subject="chat.tools")

    def arguments(self, chat: Chat, reserved: Collection[str]) -> dict[str, Variable]:
        """Returns the arguments that a conversation has for the template, other than the `reserved`
        ones. Raises InvalidArgument for one that the template does not read."""
        found = self._of_effort(chat) if chat.reasoning_effort else {}
        for name, value in chat.variables.items():
            reason = "is set by this server" if name in reserved else ""
            if not reason and name not in self.variables:
                reason = "is no argument that the chat template reads"
            if reason:
                raise InvalidArgument(
                    f"chat_template_kwargs: {name!a} {reason}",
                    subject="chat.chat_template_kwargs",
                )
            found[name] = value
        return found

    def _of_effort(self, chat: Chat) -> dict[str, Variable]:
        """Returns the effort for templates that know some, or whether there are thoughts at all."""
        effort = chat.reasoning_effort
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": effort}
        for name in SWITCHES:
            if name in self.variables:
                return {name: effort != NO_EFFORT}
        if chat.may_lack_effort:
            return {}
        raise InvalidArgument(
            f"reasoning_effort: the chat template reads neither it nor {' nor '.join(SWITCHES)}",
            subject="chat.reasoning_effort",
        )

    @property
    def reads_parts(self) -> bool:
        """Whether the template reads contents as lists of texts and images."""
        return {"type", "image"} <= self.fields

    def check_images(self, messages: Sequence[ChatMessage]) -> None:
        """Raises InvalidArgument for images that the template does not show to the model."""
        for message in messages:
            if message.images and not self.reads_parts:
                where = message.images[0].where
                raise InvalidArgument(
                    f"{where}: the chat template shows no images to the model: use a model whose "
                    "template does",
                    subject=where,
                )

    @property
    def reasoning_field(self) -> str:
        """The field of a message from which the template takes its thoughts; "" for none."""
        return next((name for name in REASONING_FIELDS if name in self.fields), "")


def _texts(node: nodes.Node) -> set[str]:
    """Returns the texts in an expression, except for the names of attributes."""
    if isinstance(node, nodes.Const):
        return {node.value} if isinstance(node.value, str) else set()
    children = [node.node] if isinstance(node, nodes.Getitem) else node.iter_child_nodes()
    return {text for child in children for text in _texts(child)}


def with_names(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Yields the messages. Results without the name of their tool, which some templates show and
    OpenAI's API does not have, get their call's."""
    names: dict[str, str] = {}
    for each in messages:
        names.update((call.call_id, call.name) for call in each.tool_calls if call.call_id)
        lacks_name = each.tool_call_id in names and not each.name
        yield replace(each, name=names[each.tool_call_id]) if lacks_name else each


def forms(messages: Sequence[ChatMessage], names: TemplateNames) -> Iterator[list[ChatMessage]]:
    """Yields the conversation as it is, and then others for templates that refuse it or leave out a
    part: with developers' messages as the system's, which is the first one for a template that does
    not know the role, with all of these as one at the begin, and all of these without thoughts; and
    then all of these with short ids of calls, with one call a message, and with both. Raises
    InvalidArgument for a role that the template does not know, and for calls of tools that it does
    not show."""
    _check_names(messages, names)
    if not names.reasoning_field:
        messages = _without_reasoning(messages)
    yielded: list[list[ChatMessage]] = []
    for history in _histories(list(messages)):
        for form in _forms_of_roles(history, names):
            if form not in yielded:
                yielded.append(form)
                yield form


def _check_names(messages: Sequence[ChatMessage], names: TemplateNames) -> None:
    for index, message in enumerate(messages):
        if message.role not in (*ROLES, TOOL) and message.role not in names.compared:
            raise field_error(
                index,
                "role",
                f"the chat template does not know the role {message.role[:MAX_ROLE_CHARS]!r}: use "
                f"{', '.join(ROLES[:-1])} or {ROLES[-1]}",
            )
        if message.tool_calls and "tool_calls" not in names.fields:
            raise field_error(
                index,
                "tool_calls",
                "the chat template shows no calls of tools: write the call into the content, or "
                "use a model whose template does",
            )


def _histories(messages: list[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """Yields the messages with their calls as they are, and as some templates want them."""
    for history in (messages, _with_objects(messages)):
        yield history
        short = _with_short_ids(history)
        yield short
        yield _with_single_calls(history)
        yield _with_single_calls(short)


def _with_objects(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages with arguments of calls that are no object as the only entry of one, for
    templates that write arguments one by one."""
    return [
        replace(each, tool_calls=tuple(map(_with_object, each.tool_calls)))
        if each.tool_calls
        else each
        for each in messages
    ]


def _with_object(call: ToolCall) -> ToolCall:
    if call.found is not None:
        return call
    text = call.arguments.encode(errors="replace").decode()  # no halves of characters
    return replace(call, arguments=json.dumps({ARGUMENTS: text}))


def _with_short_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages with ids of calls that other models and clients have made shortened."""
    return [
        replace(
            each,
            tool_calls=tuple(
                replace(call, call_id=_short_id(call.call_id)) for call in each.tool_calls
            ),
            tool_call_id=_short_id(each.tool_call_id),
        )
        if each.tool_calls or each.tool_call_id
        else each
        for each in messages
    ]


def _short_id(call_id: str) -> str:
    is_short = len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum()
    if is_short or not call_id:
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID_CHARS]


def _with_single_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages with each call in one of its own, before its result. The last message
    stays as it is."""
    found: list[ChatMessage] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if len(message.tool_calls) < 2 or place == len(messages):
            found.append(message)
            continue
        results = list(takewhile(lambda each: each.role == TOOL, messages[place:]))
        place += len(results)
        found += _one_by_one(message, results)
    return found


def _one_by_one(message: ChatMessage, results: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yields the calls of a message, each with its result; other results come last."""
    by_id: defaultdict[str, deque[ChatMessage]] = defaultdict(deque)
    for each in results:
        by_id[each.tool_call_id].append(each)
    for call in message.tool_calls:
        yield replace(message, tool_calls=(call,))
        message = ChatMessage(ASSISTANT, "")
        if own := by_id[call.call_id]:
            yield own.popleft()
    for others in by_id.values():
        yield from others


def _forms_of_roles(
    messages: list[ChatMessage], names: TemplateNames
) -> Iterator[list[ChatMessage]]:
    as_system = [
        replace(each, role=SYSTEM) if each.role == DEVELOPER else each for each in messages
    ]
    own = messages if DEVELOPER in names.compared else as_system
    found = [own, as_system, _joined(as_system), _joined(own)]
    yield from found
    yield from map(_without_reasoning, found)


def _without_reasoning(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages without thoughts, which templates may refuse next to other contents."""
    return [replace(each, reasoning="") if each.reasoning else each for each in messages]


def _joined(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages with the system's and developers' as one at the begin."""
    leading = [each for each in messages if each.role in (SYSTEM, DEVELOPER)]
    if not leading:
        return list(messages)
    text = SEPARATOR.join(each.content for each in leading)
    rest = [each for each in messages if each.role not in (SYSTEM, DEVELOPER)]
    return [replace(leading[0], content=text), *rest]


class Marks:
    """Numbers around the texts of messages, by which they are found in a prompt. Templates may trim
    a text or replace parts of it, but they leave digits alone."""

    def __init__(self) -> None:
        self._base = f"{secrets.randbelow(10**12):012}"

    def around(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns the messages with marks at both ends of their texts, and after the names of
        calls where a message has several."""
        return [
            self._marked(index, each) if _is_checked(each) else self._with_marked_calls(index, each)
            for index, each in enumerate(messages)
        ]

    def _with_marked_calls(self, index: int, message: ChatMessage) -> ChatMessage:
        if len(message.tool_calls) < 2:
            return message
        calls = (
            replace(call, name=call.name + self._at(index, place))
            for place, call in enumerate(message.tool_calls)
        )
        return replace(message, tool_calls=tuple(calls))

    def _marked(self, index: int, message: ChatMessage) -> ChatMessage:
        before, behind = f"{self._at(index, 0)} ", f" {self._at(index, 1)}"
        images = tuple(
            replace(each, place=each.place + len(before)) if each.place else each
            for each in message.images
        )
        return replace(message, content=f"{before}{message.content}{behind}", images=images)

    def missing(self, messages: Sequence[ChatMessage], prompt: str) -> int | None:
        """Returns the index of the first message of which a prompt of marked messages lacks an
        end, or one of several calls."""
        found = set(re.findall(self._base + r"\d{11}", prompt))
        for index, each in enumerate(messages):
            num_marks = 2 if _is_checked(each) else len(each.tool_calls)
            marks = {self._at(index, place) for place in range(num_marks)}
            if num_marks > 1 and not marks <= found:
                return index
        return None

    def _at(self, index: int, place: int) -> str:
        return f"{self._base}{index:06}{place:05}"


def is_certain(messages: Sequence[ChatMessage], prompt: str) -> bool:
    """Returns whether a prompt has the texts of all messages, one after the other, and none that
    could be there by chance. Templates may show only the first of several calls."""
    if any(len(each.tool_calls) > 1 for each in messages):
        return False
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


def check_shown(tools: Sequence[Tool], prompt: str) -> None:
    """Raises InvalidArgument for a tool that is not in the prompt."""
    for index, tool in enumerate(tools):
        if tool.name not in prompt:
            field = f"tools[{index}]"
            raise InvalidArgument(
                f"{field}: the chat template leaves this tool out of the prompt",
                subject=f"chat.{field}",
            )


def left_out(index: int, message: ChatMessage) -> InvalidArgument:
    """Returns the error for a message that is not in the prompt."""
    return field_error(
        index,
        "content",
        f"the chat template leaves this {message.role} message out of the prompt, or a part of it; "
        f"{_ADVICE}",
    )


def not_in_parts(index: int, message: ChatMessage) -> InvalidArgument:
    """Returns the error for a message that the template shows as a list of parts."""
    if message.images:
        return field_error(
            index,
            "content",
            f"the chat template shows no images in {message.role} messages: send them as a user's",
        )
    return field_error(
        index,
        "content",
        f"the chat template shows no {message.role} message next to images: {_ADVICE}",
    )
