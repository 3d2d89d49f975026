"""The lines of `loadout register` and `loadout check` about an adapter's tokenizer and chat
template.

Servers use them for its requests where the tokenizer only adds tokens to the base model's. Where it
changes others, requests for the adapter are refused; and without unused ones the adapter generates
badly although nothing has failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract.adapter_files import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from contract.folders import GivenFolder, shown
from contract.tokenizer_extract import InvalidTokenizer, default_template, read_tokens

MAX_FILE_BYTES = 64 << 20
MAX_SHOWN = 3
"""How many added tokens are named."""
MAX_TOKEN_CHARS = 40

TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
"""Files with the tokens of tokenizers without a tokenizer.json."""
ADDED_TOKENS = "added_tokens.json"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The parts of a tokenizer in an open folder. `tokens` are ids by token; none where neither
    tokenizer.json nor vocab.json says which there are."""

    folder: GivenFolder
    tokens: Mapping[str, int]
    template: str

    @property
    def has_tokens(self) -> bool:
        return any(map(self.folder.has, (TOKENIZER_FILE, *VOCABULARY_FILES)))

    @property
    def is_used(self) -> bool:
        """Whether the store reads it."""
        return self.folder.has(TOKENIZER_FILE)

    @property
    def has_added_alone(self) -> bool:
        """Whether only the tokens that were added are there."""
        return not self.has_tokens and self.folder.has(ADDED_TOKENS)

    @property
    def used_parts(self) -> list[str]:
        """The parts that the store reads, in words."""
        found = {"tokenizer": self.is_used, "chat template": bool(self.template)}
        return [part for part, is_there in found.items() if is_there]

    @property
    def unused_parts(self) -> list[str]:
        """The parts that the store does not read, in words."""
        found = {
            "tokenizer without a tokenizer.json": self.has_tokens and not self.is_used,
            ADDED_TOKENS: self.has_added_alone,
        }
        return [part for part, is_there in found.items() if is_there]


def describe_tokenizer(folder: Path, model: Path | None, base_model: str) -> str:
    """Returns a line on the text files of the adapter in `folder`, compared with the base model in
    the folder `model`, or where the adapter's config or `base_model` leads to one on this machine;
    "" if there is nothing. Raises FileRefused for a folder that cannot be read."""
    with ExitStack() as stack:
        saved = read_tokenizer(stack.enter_context(GivenFolder(folder)))
        used, unused = saved.used_parts, saved.unused_parts
        if not (used or unused):
            return ""
        said = []
        if used:
            said.append(f"the adapter's {_joined(used)} {_are(used)} used for its requests")
        if unused:
            said.append(f"the adapter's {_joined(unused)} {_are(unused)} not used")
        found = _find_model(saved.folder, base_model) if model is None else model
        if found is None:
            differ = "it differs" if len(used + unused) == 1 else "they differ"
            said.append(f"give --model DIR, the base model's folder, to see whether {differ}")
            return f"note: {'; '.join(said)}"
        base = stack.enter_context(GivenFolder(found, is_trusted=True))
        return _compare(saved, read_tokenizer(base), said)


def _compare(saved: Tokenizer, base: Tokenizer, said: list[str]) -> str:
    """Returns the line of a folder that has one of the parts, which begins with `said`."""
    model, is_bad, same = shown(base.folder.path), False, []
    if saved.has_tokens or (saved.has_added_alone and base.tokens):
        changes, added = _compare_tokens(saved, base)
        is_bad = bool(changes or (added and not saved.is_used))
        if changes is None:
            said.append(f"the tokenizer in {model} has another form and was not compared")
        elif changes and saved.is_used:
            said.append(
                f"compared with the base model's in {model} {'; '.join(changes)}: requests for the "
                "adapter are refused"
            )
        elif changes or added:
            what = "it adds" if saved.is_used else "servers read as ordinary text:"
            clauses = [f"{what} {added}"] if added else []
            clauses += changes or ()
            said.append(f"compared with the base model's in {model} {'; '.join(clauses)}")
        else:
            same.append("tokens")
    if saved.template:
        if saved.template.strip() == base.template.strip():
            same.append("chat template")
        else:
            said.append("chats are formatted differently from the base model's")
    if same:
        said.append(f"the base model in {model} has the same {_joined(same)}")
    return f"{'warning' if is_bad else 'note'}: {'; '.join(said)}"


def has_tokenizer(model: Path) -> bool:
    """Returns whether a model's folder has all parts of a tokenizer."""
    return any(os.path.isfile(model / name) for name in (TOKENIZER_FILE, *VOCABULARY_FILES))


def read_tokenizer(folder: GivenFolder) -> Tokenizer:
    """Reads the parts that are there and well-formed."""
    config = _read_json(folder, TOKENIZER_CONFIG)
    tokenizer = Tokenizer(folder, {}, _read_template(folder, config))
    whole = _read_json(folder, TOKENIZER_FILE)
    vocabulary, added = _read_json(folder, "vocab.json"), _read_json(folder, ADDED_TOKENS)
    if not whole and (vocabulary or not tokenizer.has_tokens):  # of an older form
        listed = [{"id": number, "content": token} for token, number in added.items()]
        whole = {"model": {"vocab": vocabulary}, "added_tokens": listed}
    try:
        return replace(tokenizer, tokens=read_tokens(whole, config))
    except InvalidTokenizer:
        return tokenizer


def _compare_tokens(saved: Tokenizer, base: Tokenizer) -> tuple[list[str] | None, str]:
    """Returns the differences to the base model's tokens, in words, None if the files cannot be
    compared; and which tokens are added, "" for none.

    Other parts, such as the splitter of texts, are not: releases write equal ones differently, and
    trainers do not change them."""
    if not (saved.tokens and base.tokens):
        return _compare_files(saved.folder, base.folder), ""
    found = []
    missing = base.tokens.keys() - saved.tokens.keys()
    if missing and not saved.has_added_alone:
        found.append(f"it lacks {_count(missing)}")
    shared = saved.tokens.keys() & base.tokens.keys()
    moved = [each for each in shared if saved.tokens[each] != base.tokens[each]]
    if moved:
        found.append(f"it has other ids for {_count(moved)}")
    return found, _added_tokens(saved, base)


def _added_tokens(saved: Tokenizer, base: Tokenizer) -> str:
    added = sorted(saved.tokens.keys() - base.tokens.keys(), key=saved.tokens.__getitem__)
    shown = ", ".join(map(_shown, added[:MAX_SHOWN])) + ", ..." * (len(added) > MAX_SHOWN)
    return f"{_count(added)} ({shown})" if added else ""


def _compare_files(saved: GivenFolder, base: GivenFolder) -> list[str] | None:
    both = [name for name in VOCABULARY_FILES if saved.has(name) and base.has(name)]
    if not both:
        return None
    try:
        others = [each for each in both if _read(saved, each) != _read(base, each)]
    except OSError:
        return None
    return [f"it has another {name}" for name in others]


def _find_model(folder: GivenFolder, base_model: str) -> Path | None:
    """Returns the base model's folder if it is on this machine: the path that is its name, or the
    hub's cache of it."""
    config = _read_json(folder, CONFIG_FILE)
    # PEFT's name of it, and MLX-LM's
    for name in (base_model, config.get("base_model_name_or_path"), config.get("model")):
        if not isinstance(name, str) or not name:
            continue
        found = Path(name) if os.path.isdir(name) else _cached(name)
        if found is not None and has_tokenizer(found):
            return found
    return None


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache  # slow to import, and rarely needed

        found = try_to_load_from_cache(name, TOKENIZER_CONFIG)
    # Without the library, or with variables that it does not take; a cache that cannot be read; no
    # name of the hub's.
    except (ImportError, OSError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read_json(folder: GivenFolder, name: str) -> Mapping[str, Any]:
    """Returns a file's object; an empty one where there is none that can be read."""
    try:
        return _mapping(json.loads(_read(folder, name)))
    except (OSError, ValueError, RecursionError):
        return {}


def _read(folder: GivenFolder, name: str) -> bytes:
    """Raises FileRefused, also for a larger file than is read, and OSError."""
    with folder.open(name) as file:
        return file.read_all(MAX_FILE_BYTES)


def _read_template(folder: GivenFolder, config: Mapping[str, Any]) -> str:
    """Returns the default chat template, as transformers finds it."""
    if folder.has(TEMPLATE_FILE):
        try:
            return _read(folder, TEMPLATE_FILE).decode()
        except (OSError, ValueError):
            return ""
    found = default_template(config)
    return found if isinstance(found, str) else ""


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(token: str) -> str:
    return ascii(token[:MAX_TOKEN_CHARS]) + "..." * (len(token) > MAX_TOKEN_CHARS)


def _are(parts: Collection[str]) -> str:
    return "is" if len(parts) == 1 else "are"


def _joined(parts: Iterable[str]) -> str:
    return " and ".join(parts)


def _count(tokens: Collection[str]) -> str:
    number = len(tokens)
    return f"{number} token{'' if number == 1 else 's'}"
