"""A model's chat template, bounded in time and size: the operator chooses it with the model, and
callers choose the conversations that it is rendered for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from inference_svc.errors import TemplateTimeout
from inference_svc.text.prompt import ChatMessage
from servicekit.errors import InvalidArgument

_TURN = "loadout_turn"
CHECKED_TURNS = 16
"""How many turns are taken between two looks at the clock."""
MAX_REPEATED_CHARS = 1 << 20
"""Of one `text * number`."""


class ChatTemplate:
    """Renders conversations. `tokenizer` is transformers', and has a template, which is compiled
    with its own sandbox: no attribute that begins with an underscore, nothing that changes what it
    is given."""

    def __init__(self, tokenizer: Any) -> None:
        # Imported here: see Tokenizer.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        source = tokenizer.get_chat_template()
        # Not a cached one, which is everybody's; and of no template, because it would compute this
        # one's constants without our bounds.
        environment = _compile_jinja_template.__wrapped__("").environment
        environment.intercepted_binops = frozenset({"*", "**"})
        environment.binop_table = environment.binop_table | {"*": _multiply, "**": _power}
        self._template = environment.from_string(_with_turns(environment.parse(source)))
        self._specials = tokenizer.special_tokens_map

    def render(self, messages: tuple[ChatMessage, ...], max_chars: int, max_seconds: float) -> str:
        """Returns the conversation's text, up to where the assistant's answer begins. Raises
        InvalidArgument if the template refuses it or gives more than `max_chars`, TemplateTimeout
        if it takes `max_seconds` of a processor."""
        try:
            return "".join(self._pieces(messages, max_chars, _Turns(max_seconds)))
        except InvalidArgument:
            raise
        except Exception as error:  # templates raise any error
            raise InvalidArgument(
                f"the chat template refuses these messages: {error}", subject="chat"
            ) from error

    def _pieces(
        self, messages: tuple[ChatMessage, ...], max_chars: int, turns: _Turns
    ) -> Iterator[str]:
        num_chars = 0
        for piece in self._template.generate(
            messages=[{"role": m.role, "content": m.content} for m in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._specials,
            **{_TURN: turns.take},
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


def _with_turns(template: Any) -> Any:
    """Returns the parsed template with a call at the begin of whatever may be repeated: a template
    has no other way to run for long."""
    from jinja2 import nodes

    for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
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
