"""What `loadout register` says of a tokenizer and a chat template that lie beside an adapter.

Trainers save them, and servers use those of the base model. Where they differ the adapter was
trained on other tokens or other prompts, and generates badly without anything having failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Any

from loadout.upload import CONFIG

MAX_FILE_BYTES = 64 << 20
MAX_SHOWN = 3
"""How many added tokens are named."""
MAX_TOKEN_CHARS = 40
MAX_ID_DIGITS = 18

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
VOCABULARY_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
"""What has the tokens of tokenizers without a tokenizer.json."""
ADDED_TOKENS = "added_tokens.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What a folder has of a tokenizer. `tokens` are ids by token; none where neither
    tokenizer.json nor vocab.json says which there are."""

    folder: Path
    tokens: Mapping[str, int]
    template: str

    @property
    def has_tokens(self) -> bool:
        return has_tokenizer(self.folder)

    @property
    def has_added_alone(self) -> bool:
        """Whether only the tokens that were added are there."""
        return not self.has_tokens and _is_file(self.folder / ADDED_TOKENS)

    @property
    def parts(self) -> list[str]:
        """What is there, in words."""
        found = {
            "tokenizer": self.has_tokens,
            ADDED_TOKENS: self.has_added_alone,
            "chat template": bool(self.template),
        }
        return [part for part, is_there in found.items() if is_there]


def describe_tokenizer(folder: Path, model: Path | None, base_model: str) -> str:
    """Returns a line on what lies beside the adapter in `folder`, compared with the base model in
    the folder `model`, or where the adapter's config or `base_model` leads to one on this machine;
    "" if there is nothing."""
    saved = read_tokenizer(folder)
    parts = saved.parts
    if not parts:
        return ""
    are, differ = ("is", "it differs") if len(parts) == 1 else ("are", "they differ")
    unused = f"{_joined(parts)} beside the adapter {are} not used"
    model = model or _find_model(folder, base_model)
    if model is None:
        return f"note: {unused}; --model DIR, the base model's folder, says whether {differ}"
    return _compare(saved, read_tokenizer(model), unused)


def _compare(saved: Tokenizer, base: Tokenizer, unused: str) -> str:
    """Returns the line of a folder that has one of the parts; `unused` is its beginning."""
    differences: dict[str, list[str] | None] = {}
    if saved.has_tokens:
        differences["tokenizer"] = _compare_tokens(saved, base)
    if saved.has_added_alone and base.tokens:
        differences[ADDED_TOKENS] = _compare_added(saved, base)
    if saved.template:
        differences["chat template"] = _compare_templates(saved, base)
    differing = [part for part, found in differences.items() if found]
    same = [part for part, found in differences.items() if found == []]
    model = _printable(base.folder)
    clauses = [each for found in differences.values() for each in found or ()]
    if "tokenizer" in differences and differences["tokenizer"] is None:
        where = "the tokenizer there" if clauses or same else f"the tokenizer in {model}"
        clauses.append(f"{where} is of another form, and not compared")
    if differing:
        verb = "differs" if len(differing) == 1 else "differ"
        unused += f", and the {_joined(differing)} {verb} from the base model's in {model}"
        return f"warning: {unused}: {'; '.join(clauses)}"
    if same:
        # Merges, and what else a tokenizer has, are not compared.
        parts = _joined(part if part == "chat template" else "tokens" for part in same)
        clauses.insert(0, f"the base model in {model} has the same {parts}")
    return "; ".join([f"note: {unused}", *clauses])


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has what makes up a tokenizer."""
    return any(_is_file(folder / name) for name in (TOKENIZER, *VOCABULARY_FILES))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Reads what is there and well-formed."""
    whole, config = _read_json(folder / TOKENIZER), _read_json(folder / TOKENIZER_CONFIG)
    model = _mapping(whole.get("model"))
    tokens = _vocabulary(model.get("vocab")) or _vocabulary(_read_json(folder / "vocab.json"))
    if tokens:
        tokens |= _vocabulary(_read_json(folder / ADDED_TOKENS))
        tokens |= _added(whole.get("added_tokens"))
        decoder = _mapping(config.get("added_tokens_decoder"))
        tokens |= _added([{**_mapping(each), "id": _number(key)} for key, each in decoder.items()])
    elif not has_tokenizer(folder):
        tokens = _vocabulary(_read_json(folder / ADDED_TOKENS))
    return Tokenizer(folder, tokens, _read_template(folder, config))


def _compare_tokens(saved: Tokenizer, base: Tokenizer) -> list[str] | None:
    """Returns how the tokenizers differ, in words; None if their files cannot be compared.

    Other parts, such as what splits text before, are not: releases write equal ones differently,
    and trainers do not change them."""
    if not (saved.tokens and base.tokens):
        return _compare_files(saved.folder, base.folder)
    found = _compare_added(saved, base)
    missing = base.tokens.keys() - saved.tokens.keys()
    if missing:
        found.append(f"it lacks {_count(missing)}")
    shared = saved.tokens.keys() & base.tokens.keys()
    moved = [each for each in shared if saved.tokens[each] != base.tokens[each]]
    if moved:
        found.append(f"it has other ids for {_count(moved)}")
    return found


def _compare_added(saved: Tokenizer, base: Tokenizer) -> list[str]:
    added = sorted(saved.tokens.keys() - base.tokens.keys(), key=saved.tokens.__getitem__)
    if not added:
        return []
    shown = ", ".join(map(_shown, added[:MAX_SHOWN])) + ", ..." * (len(added) > MAX_SHOWN)
    return [f"it has {_count(added)} more ({shown}), which servers take for other text"]


def _compare_files(saved: Path, base: Path) -> list[str] | None:
    both = [name for name in VOCABULARY_FILES if _is_file(saved / name) and _is_file(base / name)]
    if not both:
        return None
    try:
        others = [each for each in both if not cmp(saved / each, base / each, shallow=False)]
    except OSError:
        return None
    return [f"it has another {name}" for name in others]


def _compare_templates(saved: Tokenizer, base: Tokenizer) -> list[str]:
    if saved.template.strip() == base.template.strip():
        return []
    how = "with the base model's" if base.template else "not at all, as the base model has none"
    return [f"chats are formatted {how}"]


def _find_model(folder: Path, base_model: str) -> Path | None:
    """Returns the base model's folder if it is on this machine: the path that is its name, or the
    hub's cache of it."""
    config = _read_json(folder / CONFIG)
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


def _read_json(path: Path) -> Mapping[str, Any]:
    """Returns a file's object; an empty one where there is none."""
    try:
        return _mapping(json.loads(_read(path)))
    except (OSError, ValueError, RecursionError):
        return {}


def _read(path: Path) -> bytes:
    """Raises OSError, and ValueError for what is no file, or a larger one than is read."""
    if not _is_file(path):  # but a pipe, which might never end
        raise ValueError(f"{path} is no file")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return data


def _read_template(folder: Path, config: Mapping[str, Any]) -> str:
    """Returns the default chat template, as transformers finds it."""
    try:
        if _is_file(folder / TEMPLATES[0]):
            return _read(folder / TEMPLATES[0]).decode()
    except (OSError, ValueError):
        return ""
    found = _read_json(folder / TEMPLATES[1]).get("chat_template", config.get("chat_template"))
    for each in _sequence(found):  # several, by name
        if _mapping(each).get("name") == "default":
            found = each.get("template")
    return found if isinstance(found, str) else ""


def _vocabulary(value: object) -> dict[str, int]:
    """Returns ids by token, of {token: id} or of a list of [token, score]."""
    if isinstance(value, Mapping):
        return {key: number for key, number in value.items() if isinstance(number, int)}
    pairs = enumerate(_sequence(value))
    return {
        each[0]: number
        for number, each in pairs
        if isinstance(each, list) and each and isinstance(each[0], str)
    }


def _added(value: object) -> dict[str, int]:
    found = map(_mapping, _sequence(value))
    return {
        each["content"]: each["id"]
        for each in found
        if isinstance(each.get("content"), str) and isinstance(each.get("id"), int)
    }


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # also where a folder may not be read


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _number(text: str) -> int:
    return int(text) if len(text) <= MAX_ID_DIGITS and text.isdecimal() else -1


def _shown(token: str) -> str:
    return ascii(token[:MAX_TOKEN_CHARS]) + "..." * (len(token) > MAX_TOKEN_CHARS)


def _printable(path: Path) -> str:
    """Returns a path as it can be printed: its name may be of an adapter's making."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def _joined(parts: Iterable[str]) -> str:
    return " and ".join(parts)


def _count(tokens: Collection[str]) -> str:
    number = len(tokens)
    return f"{number} token{'' if number == 1 else 's'}"
