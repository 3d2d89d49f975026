"""A chat template, bounded in time and size: callers choose the conversations that it is rendered
for.

A model's is chosen by its operator and rendered in this process. An adapter's is a tenant's: one
call of a filter may take all time and memory there is, which only another process can bound (see
`template_process`)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol, TypeAlias, cast

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from inference_svc.errors import TemplateTimeout
from inference_svc.text import conversation
from inference_svc.text.chat import Chat, ChatMessage
from inference_svc.text.conversation import TemplateNames
from servicekit.errors import InvalidArgument

_TURN = "loadout_turn"
CHECKED_TURNS = 16
"""How many turns are taken between two looks at the clock."""
PARTS_BEGIN = "[{'type': "
"""The begin of a content in parts that is written as it is."""
MAX_REPEATED_CHARS = 1 << 20
"""The longest text or list that one `text * number` may make."""


class Renderer(Protocol):
    """Renders conversations by a template."""

    def render(self, chat: Chat, max_chars: int, max_seconds: float) -> str:
        """Returns the conversation's text, up to where the assistant's answer begins. Raises
        InvalidArgument if the template refuses it, leaves out an instruction, or gives more than
        `max_chars`, and TemplateTimeout if it takes `max_seconds` of a processor."""
        ...


class _Refused(Exception):
    """The template refuses one form of a conversation, or leaves a part out of it."""

    def __init__(self, error: InvalidArgument) -> None:
        self.error = error


class ChatTemplate:
    """Renders as transformers does: with the same names, settings and extensions, in a sandbox of
    jinja's: no attribute that begins with an underscore, nothing that changes its arguments.
    `specials` are texts by the names of their roles, such as "eos_token".

    Raises jinja2's errors, and others, for an invalid template."""

    def __init__(
        self, source: str, specials: Mapping[str, str], with_tools: ChatTemplate | None = None
    ) -> None:
        """`with_tools` renders conversations that have tools, for models with two templates."""
        environment = _environment()
        parsed = environment.parse(source)
        self._names = TemplateNames.of(parsed)
        self._template = environment.from_string(_with_turns(parsed))
        self._environment = environment
        self._specials = dict(specials)
        self._with_tools = with_tools

    def render(self, chat: Chat, max_chars: int, max_seconds: float) -> str:
        """See Renderer. Raises InvalidArgument for any error of the template, and MemoryError."""
        if chat.tools and self._with_tools is not None:
            return self._with_tools.render(chat, max_chars, max_seconds)
        self._names.check_tools(chat.tools)
        self._names.check_images(chat.messages)
        arguments: dict[str, Any] = {
            **self._specials,
            "tools": [tool.to_template() for tool in chat.tools] or None,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        reserved = {"messages", *arguments, *self._environment.globals}
        arguments |= self._names.arguments(chat, reserved)
        field = self._names.reasoning_field
        rendering = _Rendering(self._template, arguments, field, chat, max_chars, max_seconds)
        first: InvalidArgument | None = None
        for in_parts in self._content_forms(chat):
            rendering.in_parts = in_parts
            for messages in conversation.forms(chat.messages, self._names):
                try:
                    return rendering.text(messages)
                except _Refused as refused:
                    first = first or refused.error
        assert first is not None, "a conversation has a form"
        raise first

    def _content_forms(self, chat: Chat) -> tuple[_InParts, ...]:
        """Returns which contents are in parts, in each of the ways that the template may know."""
        if any(each.images and not _of_turn(each.role) for each in chat.messages):
            return _of_all_but_system, _any
        if chat.images:
            return _any, _of_turn, _of_user
        return (_none, _any, _of_turn, _of_user) if self._names.reads_parts else (_none,)


_InParts: TypeAlias = Callable[[str], bool]
"""Returns whether contents of a role are lists of texts and images."""


def _none(_: str) -> bool:
    return False


def _any(_: str) -> bool:
    return True


def _of_all_but_system(role: str) -> bool:
    return role not in (conversation.SYSTEM, conversation.DEVELOPER)


def _of_turn(role: str) -> bool:
    """Many templates write texts of the system and of tools as they are."""
    return role in (conversation.USER, conversation.ASSISTANT)


def _of_user(role: str) -> bool:
    return role == conversation.USER


class _Rendering:
    """One chat under a template, in all of its forms within one limit of time."""

    def __init__(
        self,
        template: Template,
        arguments: Mapping[str, Any],
        reasoning_field: str,
        chat: Chat,
        max_chars: int,
        max_seconds: float,
    ) -> None:
        self._template = template
        self._arguments = arguments
        self._reasoning_field = reasoning_field
        self._chat = chat
        self._max_chars = max_chars
        self._turns = _Turns(max_seconds)
        self.in_parts: _InParts = _none
        self._end = f"{secrets.randbelow(10**18):018}"

    def text(self, messages: Sequence[ChatMessage]) -> str:
        """Returns the text of one form. Raises _Refused."""
        text = self._render(messages, self._max_chars)
        conversation.check_shown(self._chat.tools, text)
        if not conversation.is_certain(messages, text):
            missing = self._missing(messages)
            if missing is not None:
                raise _Refused(conversation.left_out(missing, messages[missing]))
        return self._unfinished(messages, text) if self._chat.continue_final_message else text

    def _missing(self, messages: Sequence[ChatMessage]) -> int | None:
        """Returns the index of a message that the template leaves out."""
        marks = conversation.Marks()
        num_marked = len(messages) + sum(len(each.tool_calls) for each in messages)
        max_chars = self._max_chars + conversation.MARKS_CHARS * num_marked
        try:
            marked = self._render(marks.around(messages), max_chars)
        except _Refused:  # the template looks into the texts
            return None
        return marks.missing(messages, marked)

    def _unfinished(self, messages: Sequence[ChatMessage], text: str) -> str:
        """Cuts off all after the final message, and its last spaces if the template does."""
        place = text.rfind(self._end)
        if place < 0:
            raise _Refused(conversation.left_out(len(messages) - 1, messages[-1]))
        before = text[:place]
        return before if text.startswith(f"{self._end} ", place) else before.rstrip()

    def _render(self, messages: Sequence[ChatMessage], max_chars: int) -> str:
        if self._chat.continue_final_message:
            *others, last = messages
            messages = [*others, replace(last, content=f"{last.content}{self._end} ")]
        try:
            text = "".join(self._pieces(messages, max_chars))
        except (InvalidArgument, MemoryError):
            raise
        except Exception as error:  # templates raise any error
            raise _Refused(conversation.refused(messages, error)) from error
        self._check_parts(messages, text)
        return text

    def _check_parts(self, messages: Sequence[ChatMessage], text: str) -> None:
        """Raises _Refused for a prompt with a Python list: the template writes a content as it is,
        and takes it for a text."""
        if PARTS_BEGIN not in text:
            return
        for index, message in enumerate(messages):
            if self.in_parts(message.role) and str(message.parts()) in text:
                raise _Refused(conversation.not_in_parts(index, message))

    def _pieces(self, messages: Sequence[ChatMessage], max_chars: int) -> Iterator[str]:
        num_chars = 0
        for piece in self._template.generate(
            messages=[
                each.to_template(self._reasoning_field, in_parts=self.in_parts(each.role))
                for each in messages
            ],
            **self._arguments,
            **{_TURN: self._turns.take},
        ):
            num_chars += len(piece)
            if num_chars > max_chars:
                raise InvalidArgument(
                    f"these messages have more than {max_chars} characters under the chat template",
                    subject="chat",
                )
            yield piece


class _Turns:
    """Counts the turns of loops and macros of one rendering, and ends it when its time is over."""

    def __init__(self, max_seconds: float) -> None:
        self._num_taken = 0
        self._max_seconds = max_seconds
        # Of this thread: on a busy machine others take their time meanwhile.
        self._end_s = time.thread_time() + max_seconds

    def take(self) -> str:
        self._num_taken += 1
        if self._num_taken % CHECKED_TURNS == 0 and time.thread_time() > self._end_s:
            raise TemplateTimeout(
                f"the chat template takes more than {self._max_seconds:g} s for these messages",
                subject="chat",
            )
        return ""


class _Generation(Extension):
    """The tag around the text that a model is trained on, which changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _TemplateNamespace(Namespace):
    """Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set `self`
        own, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


class _TemplateDict:
    """Makes dictionaries, and is not their type, which has more to offer."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})


def _environment() -> Environment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.binop_table = environment.binop_table | {"*": _multiply, "**": _power}
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_TemplateDict(),
        namespace=_TemplateNamespace,
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's escapes nothing for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _with_turns(template: nodes.Template) -> nodes.Template:
    """Returns the parsed template with a call at the begin of every part that may be repeated: a
    template has no other way to run for long, but for calls that take long themselves."""
    repeated = template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
    for node in list(cast("Iterator[nodes.For]", repeated)):
        call = nodes.Call(nodes.Name(_TURN, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    return template


def _multiply(left: Any, right: Any) -> Any:
    for text, number in ((left, right), (right, left)):
        is_repeated = isinstance(text, (str, list, tuple)) and isinstance(number, int)
        if is_repeated and len(text) * number > MAX_REPEATED_CHARS:
            raise ValueError(f"{len(text)} * {number} is more than {MAX_REPEATED_CHARS}")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if abs(right) > 64:
        raise ValueError(f"** {right} is more than 64")
    return left**right
