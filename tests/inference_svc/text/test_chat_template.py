"""Chat templates give what transformers gives, in bounded time and size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from inference_svc.errors import TemplateTimeout
from inference_svc.text.chat import Chat, ChatMessage, MessageImage
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


LOOP = (
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
)
IN_PARTS = {
    "all": (("system", "user", "assistant"), ""),
    "turns": (("user", "assistant"), "{{ m['content'] }}"),
    "turns, others joined": (("user", "assistant"), "{{ 'a ' + m['content'] }}"),
    "of the user": (("user",), "{{ m['content'] }}"),
    "of the user, others joined": (("user",), "{{ 'a ' + m['content'] }}"),
}


@pytest.mark.parametrize("has_image", [True, False])
@pytest.mark.parametrize("name", IN_PARTS)
def test_contents_are_in_parts_where_the_template_reads_them(
    tmp_path: Path, name: str, has_image: bool
) -> None:
    """transformers' callers choose the form of each message."""
    roles, other = IN_PARTS[name]
    each = f"{{% if m['role'] in {list(roles)} %}}{LOOP}{{% else %}}{other}{{% endif %}}"
    tokenizer = tokenizer_with(tmp_path, f"{{% for m in messages %}}{each}|{{% endfor %}}")
    conversation: list[dict[str, Any]] = []
    messages: list[ChatMessage] = []
    for role, text in (("system", "be kind"), ("user", "hi"), ("assistant", "yes"), ("user", "so")):
        images = (MessageImage(0, b"", "image 0"),) if has_image and text == "hi" else ()
        messages.append(ChatMessage(role, text, images=images))
        parts = [*([{"type": "image"}] * len(images)), {"type": "text", "text": text}]
        conversation.append({"role": role, "content": parts if role in roles else text})
    theirs = tokenizer.apply_chat_template(conversation, tokenize=False)
    chat = Chat(tuple(messages), add_generation_prompt=False)
    assert compiled(tokenizer).render(chat, 10_000, 10.0) == theirs


def test_a_list_that_is_shown_as_it_is_is_refused() -> None:
    source = f"{{% for m in messages %}}{{{{ m['content'] }}}}{{% if false %}}{LOOP}{{% endif %}}"
    template = ChatTemplate(source + "{% endfor %}", {})
    image = MessageImage(0, b"", "image 0")
    with pytest.raises(InvalidArgument, match="no images in user messages") as refused:
        template.render(Chat((ChatMessage("user", "hi", images=(image,)),)), 10_000, 10.0)
    assert refused.value.subject == "chat.messages[0].content"


@pytest.mark.parametrize(
    "roles", [["system", "user", "tool"], ["user", "tool"], ["user", "assistant"]], ids=str
)
def test_images_in_results_of_tools_need_a_template_that_shows_them(roles: list[str]) -> None:
    each = f"{{% if m['role'] in {roles} %}}{LOOP}{{% else %}}{{{{ m['content'] }}}}{{% endif %}}"
    template = ChatTemplate(f"{{% for m in messages %}}{each}|{{% endfor %}}", {})
    images = (MessageImage(2, b"", "image 0"),)
    texts = [ChatMessage("system", "be kind"), ChatMessage("user", "hi")]
    messages = (*texts, ChatMessage("tool", "a cat", images=images))
    chat = Chat(messages, add_generation_prompt=False)
    if "tool" in roles:
        assert template.render(chat, 10_000, 10.0) == "be kind|hi|a <image>cat|"
        return
    with pytest.raises(InvalidArgument, match="no images in tool messages") as refused:
        template.render(chat, 10_000, 10.0)
    assert refused.value.subject == "chat.messages[2].content"
