"""Hostile tokenizers and chat templates beside an adapter, each with the name of what must become
of it; a case changes a folder as in `hostile`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.adapter_store.hostile import Change

TEXT_CASES: dict[str, tuple[str, Change]] = {}


def case(name: str, reason: str, change: Change) -> None:
    assert name not in TEXT_CASES, name
    TEXT_CASES[name] = (reason, change)


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def tokenizer(
    change: Callable[[dict[str, Any]], Any] = lambda fields: None, **config: Any
) -> Change:
    """Puts a tokenizer of three tokens, and one that it adds, beside the adapter, changed."""

    def write(folder: Path) -> None:
        fields: dict[str, Any] = {
            "added_tokens": [{"id": 3, "content": "<x>", "special": True}],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        }
        change(fields)
        (folder / TOKENIZER).write_text(json.dumps(fields))
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(config))

    return write


def added(**fields: Any) -> Change:
    """Adds one more token."""
    token = {"id": 4, "content": "<y>", "special": True, **fields}
    return tokenizer(lambda found: found["added_tokens"].append(token))


def text_file(name: str, data: str | bytes) -> Change:
    content = data.encode() if isinstance(data, str) else data
    return lambda folder: (folder / name).write_bytes(content)


def sparse(name: str, num_bytes: int) -> Change:
    def change(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, num_bytes)

    return change


case("tokenizer: a gigabyte", "FILE_TOO_LARGE", sparse(TOKENIZER, 1 << 30))
case("tokenizer: a config of a gigabyte", "FILE_TOO_LARGE", sparse(TOKENIZER_CONFIG, 1 << 30))
case("tokenizer: 64 MiB of NUL", "NOT_JSON", sparse(TOKENIZER, 64 << 20))
case("tokenizer: nested", "NESTED_TOO_DEEPLY", text_file(TOKENIZER, "[" * (1 << 20)))
case(
    "tokenizer: millions of lists",
    "TOKENIZER_TOO_LARGE",
    text_file(TOKENIZER, b'{"a": [' + b"[]," * (20 << 20) + b"[]]}"),
)
case("tokenizer: a list", "NOT_AN_OBJECT", text_file(TOKENIZER, "[]"))
case("tokenizer: no model", "TOKENIZER_INVALID", text_file(TOKENIZER, "{}"))
case(
    "tokenizer: no vocabulary",
    "TOKENIZER_INVALID",
    tokenizer(lambda found: found["model"].update(vocab=7)),
)
case(
    "tokenizer: a merge of three",
    "TOKENIZER_INVALID",
    tokenizer(lambda found: found["model"].update(merges=["a b c"])),
)
case(
    "tokenizer: a piece without a score",
    "TOKENIZER_INVALID",
    tokenizer(lambda found: found["model"].update(vocab=[["a"]])),
)
case(
    "tokenizer: one id twice in the vocabulary",
    "TOKEN_TWICE",
    tokenizer(lambda found: found["model"].update(vocab={"a": 0, "b": 0})),
)
case(
    "tokenizer: one token twice in the vocabulary",
    "DUPLICATE_KEY",
    text_file(TOKENIZER, '{"model": {"vocab": {"a": 0, "a": 1}}}'),
)
case("tokenizer: a token added twice", "TOKEN_TWICE", added(content="<x>"))
case("tokenizer: a token added twice alike", "TOKEN_TWICE", added(content="<x>", id=3))
case("tokenizer: an id added twice", "TOKEN_TWICE", added(id=3))
case("tokenizer: the id of another token", "TOKEN_TWICE", added(id=0))
case("tokenizer: another id for a token", "TOKEN_TWICE", added(content="ab"))
case(
    "tokenizer: another id in its config",
    "TOKEN_TWICE",
    tokenizer(added_tokens_decoder={"9": {"content": "<x>"}}),
)
case(
    "tokenizer: another token in its config",
    "TOKEN_TWICE",
    tokenizer(added_tokens_decoder={"3": {"content": "<z>"}}),
)
case("tokenizer: a negative id", "TOKEN_INVALID", added(id=-1))
case("tokenizer: an id beyond all", "TOKEN_INVALID", added(id=1 << 40))
case("tokenizer: an id that is true", "TOKEN_INVALID", added(id=True))
case("tokenizer: a token without text", "TOKEN_INVALID", added(content=""))
case("tokenizer: a token that is a number", "TOKEN_INVALID", added(content=7))
case("tokenizer: a token of a megabyte", "TOKEN_INVALID", added(content="x" * (1 << 20)))
case("tokenizer: a token of half a character", "TOKEN_INVALID", added(content="\ud800"))
case(
    "tokenizer: more tokens than any model",
    "TOO_MANY_TOKENS",
    tokenizer(
        lambda found: found.update(
            added_tokens=[{"id": 3 + i, "content": f"<{i}>"} for i in range(40_000)]
        )
    ),
)
case("template: a gigabyte", "FILE_TOO_LARGE", sparse("chat_template.jinja", 1 << 30))
case("template: not UTF-8", "TEMPLATE_INVALID", text_file("chat_template.jinja", b"\xff{{ 1 }}"))
case("template: not a text", "TEMPLATE_INVALID", tokenizer(chat_template={"default": 7}))
case("template: half a character", "TEMPLATE_INVALID", tokenizer(chat_template="\ud800"))
case(
    "template: megabytes in a config",
    "TEMPLATE_INVALID",
    tokenizer(chat_template="x" * (2 << 20)),
)
case(
    "tokenizer: link out of the roots",
    "SOURCE_NOT_ALLOWED",
    lambda folder: (folder / TOKENIZER).symlink_to("/etc/hostname"),
)
case("tokenizer: pipe", "INVALID_ARGUMENT", lambda folder: os.mkfifo(folder / TOKENIZER))
