"""Chat templates give what transformers gives, in bounded time and size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from inference_svc.errors import TemplateTimeout
from inference_svc.text.chat import Chat, ChatMessage
from inference_svc.text.chat_template import ChatTemplate
from servicekit.errors import InvalidArgument
from tests.support.models.templates import ENDLESS, REFUSED
from tests.support.models.tokenizers import CHAT_TEMPLATE, byte_level, save_tokenizer

MESSAGES = (
    ChatMessage("system", "be kind"),
    ChatMessage("user", "hi <b>"),
    ChatMessage("assistant", ""),
)
CHAT = Chat(MESSAGES)
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "loop": ALL + "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
    "{% if loop.first %}{% continue %}{% endif %}{{ m.content | trim }}{% else %}none{% endfor %}",
    "macro": "{% macro show(m) %}[{{ m['role'] }}]{{ '-' * 3 }}{{ 2 ** 3 }}{% endmacro %}"
    "{% set ns = namespace(n=0) %}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}"
    "{{ show(m) }}{% endfor %}{{ ns.n }}{{ messages | tojson }}{{ bos_token }}",
    "globals": "{{ dict(a=1) | tojson(indent=2) }}{{ dict.fromkeys([1, 2]) }}"
    "{% set ns = namespace(self=1, b=2) %}{{ ns.self + ns.b }}{{ strftime_now('%Y') }}" + ALL,
    "spaces": "  {% if true %}\n  {{ eos_token }}  \n  {% endif %}\n{# none #}\n<&>'\n" + ALL,
    "recursive": ALL + "{% for x in [[1], [2, [3]]] recursive %}"
    "{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
    "call": "{% macro box() %}<{{ caller() }}>{% endmacro %}"
    "{% call box() %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endcall %}"
    + ALL,
}


def tokenizer_with(folder: Path, template: str) -> Any:
    return AutoTokenizer.from_pretrained(str(save_tokenizer(byte_level(), folder, template)))


def compiled(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_what_transformers_renders(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    conversation = [{"role": m.role, "content": m.content} for m in MESSAGES]
    theirs = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert compiled(tokenizer).render(CHAT, 10_000, 10.0) == theirs


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_end(tmp_path: Path, name: str) -> None:
    template = compiled(tokenizer_with(tmp_path, ENDLESS[name]))
    start = time.thread_time()
    with pytest.raises(TemplateTimeout, match=r"more than 0\.1 s"):
        template.render(CHAT, 10_000, 0.1)
    assert time.thread_time() - start < 5.0


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_templates_are_refused(tmp_path: Path, name: str) -> None:
    source, message = REFUSED[name]
    template = compiled(tokenizer_with(tmp_path, source))
    with pytest.raises(InvalidArgument, match=message) as caught:
        template.render(CHAT, 10_000, 10.0)
    assert caught.value.subject == "chat"
