"""Reads a tokenizer's files: the task of a sandboxed process.

A request has `folder` and `names`, the files in it. The kind of an answer is T, the texts: the
extract and, on the next line, the chat template, each empty if there is none; or R, refused: the
reason, the subject and the message, each on a line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

from adapter_store.checkpoint.reading.json import parse_object
from adapter_store.errors import InvalidAdapter
from contract.tokenizer_extract import (
    MAX_EXTRACT_BYTES,
    InvalidTokenizer,
    default_template,
    make_extract,
)


def read_files(names: Collection[str], content: Callable[[str], bytes]) -> tuple[bytes, bytes]:
    """Returns the extract, and the chat template of the configuration. Raises InvalidTokenizer, and
    InvalidAdapter for a file that is no JSON object."""

    def read(name: str) -> Any:
        return parse_object(content(name), name) if name in names else None

    config = read("tokenizer_config.json") or {}
    template = template_of(config)
    tokenizer = read("tokenizer.json")
    if tokenizer is None:
        return b"", template
    extract = make_extract(tokenizer, config, read("special_tokens_map.json")).to_bytes()
    if len(extract) > MAX_EXTRACT_BYTES:
        raise InvalidTokenizer(
            f"tokenizer.json: its added tokens take {len(extract)} bytes, more than "
            f"{MAX_EXTRACT_BYTES}",
            "tokenizer.json",
            "TOO_MANY_TOKENS",
        )
    return extract, template


def template_of(config: dict[str, Any]) -> bytes:
    """Returns the chat template of a configuration, of several the template that is called
    "default"; the parent checks it. Raises InvalidTokenizer TEMPLATE_INVALID if it is no text."""
    found = default_template(config)
    if found is None:
        return b""
    if not isinstance(found, str):
        name = "tokenizer_config.json"
        raise InvalidTokenizer(f"{name}: chat_template is no text", name, "TEMPLATE_INVALID")
    return found.encode("utf-8", "surrogatepass")


def answer(request: dict[str, Any]) -> tuple[bytes, bytes | str]:
    """Returns the kind of the answer, and its content."""

    def content(name: str) -> bytes:
        with open(os.path.join(request["folder"], name), "rb") as file:
            return file.read()

    try:
        extract, template = read_files(request["names"], content)
    except (InvalidTokenizer, InvalidAdapter) as error:
        return b"R", f"{error.reason}\n{error.subject}\n{error}"
    return b"T", extract + b"\n" + template
