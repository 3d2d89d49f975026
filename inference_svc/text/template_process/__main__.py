"""Renders adapters' chat templates: the program of a limited child process.

Run as `python -I .../__main__.py ROOT MEMORY_BYTES`; ROOT is where our packages lie. A request on
stdin is its length, four bytes, and JSON; a reply on stdout is its kind, one byte, its length and
its text: T the conversation, R the subject of a refusal and, on the next line, its reason, S that
it takes too long, I why it is no template. The system ends a process that takes more memory or
time than that.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any

EXTRA_SECONDS = 0.5
"""How much longer a rendering may take that does not notice that its time is over."""
MAX_TEMPLATES, MAX_TEMPLATE_CHARS = 64, 1 << 20
"""Compiled, a template takes up to some fifty times as much as its text: so one tenant's leave
memory for others'."""
MAX_ERROR_CHARS = 500
PR_SET_NO_NEW_PRIVS = 38


def set_limits(memory_bytes: int) -> None:
    """Sets the limits from here on, in addition to the imports' use."""
    with open("/proc/self/statm") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, mapped_bytes + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (limit, limit))
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


class Templates:
    """The templates that were rendered last, compiled."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Any] = OrderedDict()
        self._num_chars = 0

    def get(self, source: str, specials: dict[str, str]) -> Any:
        from inference_svc.text.chat_template import ChatTemplate

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


def answer(templates: Templates, request: dict[str, Any]) -> tuple[bytes, str]:
    """Returns the kind of the reply, and its text."""
    from inference_svc.errors import TemplateTimeout
    from inference_svc.text.prompt import Chat, ChatMessage
    from servicekit.errors import InvalidArgument

    max_seconds = float(request["max_seconds"])
    # By the processor's time, and by the system: nothing in this process has to notice.
    signal.setitimer(signal.ITIMER_PROF, max_seconds + EXTRA_SECONDS)
    try:
        try:
            template = templates.get(request["source"], request["specials"])
        except MemoryError:
            raise
        except Exception as error:  # jinja's parser and Python's compiler raise any
            return b"I", f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        chat = Chat(
            tuple(ChatMessage(role, content) for role, content in request["messages"]),
            add_generation_prompt=request["add_generation_prompt"],
            continue_final_message=request["continue_final_message"],
        )
        return b"T", template.render(chat, request["max_chars"], max_seconds)
    except TemplateTimeout as error:
        return b"S", error.message[:MAX_ERROR_CHARS]
    except InvalidArgument as error:
        return b"R", f"{error.subject}\n{error.message[:MAX_ERROR_CHARS]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from inference_svc.text import chat_template  # noqa: F401 (before the limits)

    set_limits(int(sys.argv[2]))
    templates, stdin, stdout = Templates(), sys.stdin.buffer, sys.stdout.buffer
    while header := stdin.read(4):
        request = json.loads(stdin.read(int.from_bytes(header, "big")))
        kind, text = answer(templates, request)
        data = text.encode(errors="replace")
        stdout.write(kind + len(data).to_bytes(4, "big") + data)
        stdout.flush()


if __name__ == "__main__":
    main()
