"""Reads a tokenizer's files, and makes their extract: all that decides how a text becomes tokens,
in a few kilobytes.

The adapter store makes it of the files beside an adapter; an inference service makes it of its own
model's, and compares. The command line compares the tokens alone. Files are Hugging Face's:
`tokenizer.json` as the `tokenizers` library writes it, with `tokenizer_config.json` and
`special_tokens_map.json` as `transformers` reads them. Parts that are large or may not differ are
hashes, of canonical JSON: releases of the library write defaults or leave them out, and merges as
pairs or as texts.

An extract is JSON of its own: the same tokenizer has the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

FORMAT = 1
MAX_ADDED_TOKENS = 1 << 15
MAX_TOKEN_CHARS = 512
MAX_TOKEN_ID = 1 << 24
MAX_EXTRACT_BYTES = 2 << 20

PIPELINE = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
MODEL_PARTS = ("vocabulary", "merges", "model")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens with a meaning of their own, in the order in which transformers adds missing ones."""
PROMPT_SETTINGS = ("add_bos_token", "add_eos_token")
"""Settings that decide the first and last tokens of a text prompt."""
SETTINGS = (
    *PROMPT_SETTINGS,
    *("add_prefix_space", "split_special_tokens", "legacy"),
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
)
"""Settings of transformers' own that change how a text becomes tokens."""

BATCH = 4096

_FLAGS = {"special": "s", "normalized": "n", "lstrip": "l", "rstrip": "r", "single_word": "w"}
_DEFAULTS = {"use_regex": True, "split": True}
"""Keys of a part of the pipeline that earlier releases of the library leave out."""


class InvalidTokenizer(Exception):
    """A tokenizer that cannot be used: `subject` names the file or the token, `reason` the rule."""

    def __init__(self, message: str, subject: str, reason: str = "TOKENIZER_INVALID") -> None:
        super().__init__(message)
        self.subject = subject
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before the vocabulary's. Flags as the `tokenizers` library
    means them."""

    id: int
    content: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerExtract:
    """`added_tokens` in order of their ids; `parts` are hashes by the names in PIPELINE and
    MODEL_PARTS; `roles` are the ones that the files mention, None for none; `settings` are the ones
    that are set."""

    added_tokens: tuple[AddedToken, ...]
    parts: Mapping[str, str]
    roles: Mapping[str, str | None]
    settings: Mapping[str, bool]

    def to_bytes(self) -> bytes:
        """Returns its canonical JSON."""
        return canonical(
            {
                "format": FORMAT,
                "added_tokens": [
                    [each.id, each.content, _flags(each)] for each in self.added_tokens
                ],
                "parts": self.parts,
                "roles": self.roles,
                "settings": self.settings,
            }
        )

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.to_bytes()).hexdigest()}"

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenizerExtract:
        """Reads bytes that `to_bytes` wrote. Raises InvalidTokenizer for anything else."""
        try:
            found = json.loads(data)
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}")
            return cls(
                tuple(_from_flags(*token) for token in found["added_tokens"]),
                {name: _typed(found["parts"][name], str) for name in (*MODEL_PARTS, *PIPELINE)},
                {
                    role: None if token is None else _typed(token, str)
                    for role, token in _typed(found["roles"], dict).items()
                    if role in ROLES
                },
                {
                    key: _typed(value, bool)
                    for key, value in _typed(found["settings"], dict).items()
                    if key in SETTINGS
                },
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidTokenizer(
                f"the tokenizer's extract cannot be read ({error}); register the adapter again",
                "tokenizer.json",
            ) from error


def canonical(value: Any) -> bytes:
    """Returns JSON with sorted keys, without spaces, in ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def make_extract(
    tokenizer: Mapping[str, Any],
    config: Mapping[str, Any],
    special_tokens_map: Mapping[str, Any] | None = None,
) -> TokenizerExtract:
    """Returns the extract of the parsed files.

    Raises InvalidTokenizer: TOKENIZER_INVALID for files that are not of the library's form,
    TOKEN_TWICE for a token with two ids or an id of two tokens, TOKEN_INVALID for a token that is
    empty or too long, or has an impossible id, TOO_MANY_TOKENS.
    """
    model = _object(tokenizer.get("model"), "model")
    vocabulary, added = _read_vocabulary(model, tokenizer, config)
    named = _merged(config, special_tokens_map)
    added += _missing(named, added, vocabulary)
    parts = {"vocabulary": vocabulary.sha256, **_model_parts(model), **_pipeline_parts(tokenizer)}
    return TokenizerExtract(
        tuple(sorted(added, key=lambda each: each.id)),
        parts,
        {role: _content(named[role]) for role in ROLES if role in named},
        {key: config[key] for key in SETTINGS if isinstance(config.get(key), bool)},
    )


def read_tokens(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of all tokens of the parsed files, by their texts. Raises InvalidTokenizer as
    `make_extract`."""
    model = _object(tokenizer.get("model"), "model")
    vocabulary, added = _read_vocabulary(model, tokenizer, config)
    return {**vocabulary.ids, **{token.content: token.id for token in added}}


def default_template(config: Mapping[str, Any]) -> Any:
    """Returns the chat template in a parsed tokenizer_config.json, of several the template that is
    called "default"; None if there is none. It need not be a text."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = (each for each in found if isinstance(each, dict))
        templates = (each.get("template") for each in named if each.get("name") == "default")
        found = next(templates, None)
    return found


def _read_vocabulary(
    model: Mapping[str, Any], tokenizer: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Vocabulary, list[AddedToken]]:
    vocabulary = Vocabulary(model.get("vocab"))
    added = list(_read_added(tokenizer.get("added_tokens"), vocabulary))
    return vocabulary, _with_decoder(config.get("added_tokens_decoder"), added, vocabulary)


class Vocabulary:
    """A model's own tokens: a map of texts to ids, or a list of (text, score) in order of ids."""

    def __init__(self, found: Any) -> None:
        """Raises InvalidTokenizer."""
        if isinstance(found, list):
            pairs = [self._pair(each) for each in found]
            self._ids = {text: index for index, (text, _) in enumerate(pairs)}
            self._lines: Sequence[Any] = pairs
            is_whole = len(self._ids) == len(found)
        elif isinstance(found, dict):
            for text, token_id in found.items():
                _check_id(token_id, text)
            self._ids = found
            self._lines = sorted(found.items())
            is_whole = len(set(found.values())) == len(found)
        else:
            raise _invalid("model.vocab is neither a map nor a list")
        if not is_whole:
            raise InvalidTokenizer(
                "tokenizer.json: model.vocab has a token with two ids, or an id of two tokens",
                "model.vocab",
                "TOKEN_TWICE",
            )
        self._texts: dict[int, str] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Mapping[str, int]:
        """The ids by text."""
        return self._ids

    @property
    def sha256(self) -> str:
        return _sha256(self._lines)

    def id_of(self, text: str) -> int | None:
        return self._ids.get(text)

    def text_of(self, token_id: int) -> str | None:
        if self._texts is None:
            self._texts = {found: text for text, found in self._ids.items()}
        return self._texts.get(token_id)

    @staticmethod
    def _pair(found: Any) -> tuple[str, str]:
        """Returns a token and its score in six digits: the last ones change whenever the library
        reads and writes them."""
        is_pair = isinstance(found, list) and len(found) == 2 and isinstance(found[0], str)
        if is_pair and isinstance(found[1], (int, float)):
            with suppress(OverflowError):  # of an integer that no float can be
                return found[0], f"{found[1]:.6g}"
        raise _invalid("model.vocab has an entry that is not a token and its score")


def hash_component(name: str, component: Any) -> str:
    """Returns the hash of one part of PIPELINE, as parsed from JSON."""
    return _sha256([_plain(component)])


def _pipeline_parts(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {name: hash_component(name, tokenizer.get(name)) for name in PIPELINE}
    except RecursionError as error:
        raise InvalidTokenizer(
            "tokenizer.json: nested too deeply", "tokenizer.json", "NESTED_TOO_DEEPLY"
        ) from error


def _model_parts(model: Mapping[str, Any]) -> dict[str, str]:
    merges = model.get("merges", [])
    if not isinstance(merges, list):
        raise _invalid("model.merges is not a list")
    rest = {
        key: value
        for key, value in model.items()
        if key not in ("vocab", "merges") and not (value is None or value is False or value == "")
    }
    return {"merges": _sha256(map(_merge, merges)), "model": _sha256([rest])}


def _merge(found: Any) -> list[str]:
    """Returns a merge as the pair that newer releases write."""
    pair = found.split(" ") if isinstance(found, str) else found
    if not isinstance(pair, list) or len(pair) != 2:
        raise _invalid("model.merges has an entry that is not a pair of tokens")
    return pair


def _plain(value: Any) -> Any:
    """Returns a part of the pipeline without values that equal the library's defaults."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {
        key: _plain(each)
        for key, each in value.items()
        if each is not None and each is not _DEFAULTS.get(key)
    }
    if found.get("type") == "Metaspace":
        begins = found.pop("add_prefix_space", True)  # before there was prepend_scheme
        found.pop("str_rep", None)
        found.setdefault("prepend_scheme", "always" if begins else "never")
    return found


def _sha256(entries: Iterable[Any]) -> str:
    """Returns the hash of the canonical JSON of the entries, in lists of BATCH: so a vocabulary
    takes less memory than as one text, and less time than entry by entry."""
    digest = hashlib.sha256()
    rest = iter(entries)
    try:
        while batch := list(islice(rest, BATCH)):
            digest.update(canonical(batch))
    except (ValueError, TypeError) as error:
        raise _invalid(str(error)) from error
    return digest.hexdigest()


def _read_added(found: Any, vocabulary: Vocabulary) -> Iterator[AddedToken]:
    if found is None:
        return
    if not isinstance(found, list):
        raise _invalid("added_tokens is not a list")
    if len(found) > MAX_ADDED_TOKENS:
        raise InvalidTokenizer(
            f"tokenizer.json: {len(found)} added tokens are more than {MAX_ADDED_TOKENS}",
            "tokenizer.json",
            "TOO_MANY_TOKENS",
        )
    ids: dict[str, int] = {}
    texts: dict[int, str] = {}
    for each in found:
        token = _to_token(_object(each, "added_tokens"), each.get("id"))
        for known in (ids.get(token.content), vocabulary.id_of(token.content)):
            if known is not None and (known != token.id or token.content in ids):
                raise _twice(
                    f"token {show(token.content)} has the ids {known} and {token.id}", token
                )
        for other in (texts.get(token.id), vocabulary.text_of(token.id)):
            if other is not None and other != token.content:
                raise _twice(
                    f"id {token.id} is of the tokens {show(other)} and {show(token.content)}", token
                )
        ids[token.content], texts[token.id] = token.id, token.content
        yield token


def _with_decoder(
    found: Any, added: Sequence[AddedToken], vocabulary: Vocabulary
) -> list[AddedToken]:
    """Returns the added tokens as tokenizer_config.json describes them, which may have further ones
    and other flags. Raises InvalidTokenizer if it gives a token another id."""
    tokens = {each.content: each for each in added}
    texts = {each.id: each.content for each in added}
    fields = _object(found or {}, "added_tokens_decoder")
    if len(fields) > MAX_ADDED_TOKENS or not all(key.isascii() and key.isdigit() for key in fields):
        raise _invalid("added_tokens_decoder is not a map of ids to tokens")
    for token_id in sorted(map(int, filter(lambda key: len(key) < 10, fields))):
        token = _to_token(_object(fields[str(token_id)], "added_tokens_decoder"), token_id)
        known = tokens.get(token.content)
        expected = known.id if known else vocabulary.id_of(token.content)
        if expected is None:
            expected = _next_id(tokens.values(), vocabulary)
        other = texts.get(token_id, vocabulary.text_of(token_id))
        if expected != token_id or (other is not None and other != token.content):
            raise _twice(
                f"token {show(token.content)} has the id {token_id} in tokenizer_config.json, and "
                f"{expected} in tokenizer.json: save both together",
                token,
            )
        tokens[token.content], texts[token_id] = token, token.content
    return list(tokens.values())


def _next_id(added: Iterable[AddedToken], vocabulary: Vocabulary) -> int:
    """Returns the id that the library gives to the next token that is not known."""
    return max([len(vocabulary) - 1, *(each.id for each in added)]) + 1


def _missing(
    named: Mapping[str, Any], added: Sequence[AddedToken], vocabulary: Vocabulary
) -> Iterator[AddedToken]:
    """Yields the special tokens that the configuration names and tokenizer.json does not add:
    transformers adds them when it loads them."""
    known = {each.content for each in added}
    next_id = _next_id(added, vocabulary)
    for found in _special_tokens(named):
        fields = found if isinstance(found, dict) else {"content": found}
        content = _content(found)
        if content is None or content in known:
            continue
        token_id = vocabulary.id_of(content)
        if token_id is None:
            token_id, next_id = next_id, next_id + 1
        known.add(content)
        yield _to_token({**fields, "special": True}, token_id)


def _special_tokens(named: Mapping[str, Any]) -> Iterator[Any]:
    for role in ROLES:
        yield named.get(role)
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or ()
    if isinstance(extra, dict):
        extra = list(extra.values())
    if isinstance(extra, list):
        yield from extra[:MAX_ADDED_TOKENS]
    for key, found in named.items():
        if key.endswith("_token") and key not in ROLES and isinstance(found, (str, dict)):
            yield found


def _merged(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any] | None) -> Any:
    """Returns the configuration with the tokens of special_tokens_map.json, which transformers
    reads only where there is no `added_tokens_decoder`."""
    if special_tokens_map is None or "added_tokens_decoder" in config:
        return config
    return {**config, **special_tokens_map}


def _content(found: Any) -> str | None:
    content = found.get("content") if isinstance(found, dict) else found
    return content if isinstance(content, str) and content else None


def _to_token(found: Mapping[str, Any], token_id: Any) -> AddedToken:
    content = found.get("content")
    if not isinstance(content, str) or not content:
        raise InvalidTokenizer(
            "tokenizer.json: an added token has no text", "added_tokens", "TOKEN_INVALID"
        )
    if len(content) > MAX_TOKEN_CHARS or not _is_unicode(content):
        raise InvalidTokenizer(
            f"tokenizer.json: token {show(content)} has more than {MAX_TOKEN_CHARS} characters, or "
            "is no Unicode text",
            show(content),
            "TOKEN_INVALID",
        )
    _check_id(token_id, content)
    flags = {name: found.get(name) is True for name in _FLAGS}
    if "normalized" not in found:
        flags["normalized"] = not flags["special"]
    return AddedToken(token_id, content, **flags)


def _check_id(token_id: Any, content: str) -> None:
    if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
        raise InvalidTokenizer(
            f"tokenizer.json: token {show(content)} has the id {show(token_id)}: ids are from 0 to "
            f"{MAX_TOKEN_ID}",
            show(content),
            "TOKEN_INVALID",
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flags(token: AddedToken) -> str:
    return "".join(letter for name, letter in _FLAGS.items() if getattr(token, name))


def _from_flags(token_id: Any, content: Any, letters: Any) -> AddedToken:
    _check_id(token_id, _typed(content, str))
    given = _typed(letters, str)
    return AddedToken(
        token_id, content, **{name: letter in given for name, letter in _FLAGS.items()}
    )


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{show(value)} is no {kind.__name__}")
    return value


def show(value: object) -> str:
    """Returns an untrusted value for an error message: quoted, escaped, shortened."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _invalid(f"{what} is not an object")
    return found


def _invalid(detail: str) -> InvalidTokenizer:
    return InvalidTokenizer(
        f"tokenizer.json: {detail}: not as the tokenizers library writes it", "tokenizer.json"
    )


def _twice(detail: str, token: AddedToken) -> InvalidTokenizer:
    return InvalidTokenizer(f"tokenizer.json: {detail}", show(token.content), "TOKEN_TWICE")
