"""Renders adapters' chat templates: the task of a sandboxed process.

The kind of an answer is T, the conversation; R, refused: the subject and, on the next line, the
reason; S, it takes too long; or I, why it is no template. The system ends a process that takes
more memory or time than that.
"""

from __future__ import annotations

import json
import signal
from collections import OrderedDict
from typing import Any

from inference_svc.errors import TemplateTimeout
from inference_svc.text.chat import Chat
from inference_svc.text.chat_template import ChatTemplate
from servicekit.errors import InvalidArgument

EXTRA_SECONDS = 0.5
"""How much longer a rendering may take that does not notice that its time is over."""
MAX_TEMPLATES, MAX_TEMPLATE_CHARS = 64, 1 << 20
"""Compiled, a template takes up to some fifty times as much as its text: so one tenant's leave
memory for others'."""
MAX_ERROR_CHARS = 500


class Templates:
    """The templates that were rendered last, compiled."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._num_chars = 0

    def get(self, source: str, specials: dict[str, str]) -> ChatTemplate:
        key = json.dumps([source, specials])
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        template = self._known[key] = ChatTemplate(source, specials)
        self._num_chars += len(key)
        while len(self._known) > MAX_TEMPLATES or self._num_chars > MAX_TEMPLATE_CHARS:
            dropped, _ = self._known.popitem(last=False)
            self._num_chars -= len(dropped)
        return template


TEMPLATES = Templates()


def answer(request: dict[str, Any]) -> tuple[bytes, str]:
    max_seconds = float(request["max_seconds"])
    # By the processor's time, and by the system: nothing in this process has to notice.
    signal.setitimer(signal.ITIMER_PROF, max_seconds + EXTRA_SECONDS)
    try:
        try:
            template = TEMPLATES.get(request["source"], request["specials"])
        except MemoryError:
            raise
        except Exception as error:  # jinja's parser and Python's compiler raise any
            return b"I", f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        chat = Chat.from_json(request["chat"])
        return b"T", template.render(chat, request["max_chars"], max_seconds)
    except TemplateTimeout as error:
        return b"S", error.message[:MAX_ERROR_CHARS]
    except InvalidArgument as error:
        return b"R", f"{error.subject}\n{error.message[:MAX_ERROR_CHARS]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
