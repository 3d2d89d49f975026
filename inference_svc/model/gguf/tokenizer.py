"""The tokenizer of a GGUF file as the files of transformers: tokenizer.json, tokenizer_config.json
and chat_template.jinja.

A file has the vocabulary, of some kinds merges or scores, and the name of the rule that splits
texts. The rest is as the original tokenizers of the families have it (llama.cpp knows the same by
these names, in its llama-vocab.cpp).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import TOKENIZER, TOKENIZER_CONFIG
from inference_svc.model.gguf.families import ARCHITECTURE
from inference_svc.model.gguf.file import Header, shown

CHAT_TEMPLATE = "chat_template.jinja"
MAX_DERIVED_CHARS = 512
"""The most characters of a token that merges are derived from: pairs grow with their square."""
_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens (`llama_token_type` in llama.h)."""
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Keys of the ids of special tokens, by their names in transformers."""
_SPACE, _WORD_START = " ", "\u2581"

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """A rule that splits texts before merges. `pattern` "" is GPT-2's. Where it `ignores_merges`, a
    whole word that is a token is not made by merges."""

    pattern: str = ""
    has_single_digits: bool = False
    ignores_merges: bool = False
    composes: bool = False
    adds_bos: bool = False


_SPLIT_LLAMA3 = _Split(_LLAMA3, ignores_merges=True, adds_bos=True)
_SPLIT_QWEN2 = _Split(_QWEN2, composes=True)
_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(),
    "smollm": _Split(has_single_digits=True),
    "llama-bpe": _SPLIT_LLAMA3,
    "llama3": _SPLIT_LLAMA3,
    "llama-v3": _SPLIT_LLAMA3,
    "falcon3": _SPLIT_LLAMA3,
    "qwen2": _SPLIT_QWEN2,
    "deepseek-r1-qwen": _SPLIT_QWEN2,
    "tekken": _Split(_TEKKEN, ignores_merges=True, adds_bos=True),
}
"""By `tokenizer.ggml.pre`."""


def tokenizer_files(header: Header) -> dict[str, str]:
    """Returns the texts of a tokenizer's files by their names; none if the file has no tokenizer.

    Raises UnsupportedModel naming the key that is not honoured, or not whole.
    """
    kind = header.metadata.get(f"{_KEY}model")
    if kind is None or kind == "none":
        return {}
    make = _MAKERS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise header.unsupported(
            f"{_KEY}model", f"supported are {', '.join(_MAKERS)}; serve it with --no-tokenizer"
        )
    vocabulary = Vocabulary(header)
    try:
        backend, adds_bos = make(vocabulary)
        _add_tokens(backend, vocabulary)
        _add_ends(backend, vocabulary, adds_bos=adds_bos)
        text = backend.to_str()
    except UnsupportedModel:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedModel(
            f"{header.path}: its tokenizer is broken ({shown(str(error))}): serve it with "
            "--no-tokenizer, or the model's safetensors"
        ) from error
    files = {TOKENIZER: text, TOKENIZER_CONFIG: _tokenizer_config(vocabulary)}
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise header.unsupported("tokenizer.chat_template", "must be a text")
    return files if template is None else {**files, CHAT_TEMPLATE: template}


class Vocabulary:
    """The tokens of a file, and what it says of them.

    Raises UnsupportedModel for lists of other lengths or kinds, and for a token that is there
    twice.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tokens = self._list("tokens", str)
        if not self.tokens:
            raise header.unsupported(f"{_KEY}tokens", "there is no token")
        self.types = self._list("token_type", int)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        for name, found in (("token_type", self.types), ("tokens", list(self.ids))):
            if found and len(found) != len(self.tokens):
                reason = f"{len(found)} for {len(self.tokens)} tokens: each must occur once"
                raise header.unsupported(_KEY + name, reason)

    def merges(self) -> list[tuple[str, str]]:
        """Returns pairs of tokens that become one, the first to merge first. Raises
        UnsupportedModel if a text is no pair."""
        found = []
        for each in self._list("merges", str):
            left, space, right = each[1:].partition(_SPACE)
            if not space:
                raise self.header.unsupported(f"{_KEY}merges", f"no pair of tokens: {shown(each)}")
            found.append((each[0] + left, right))
        return found

    def scores(self) -> list[float]:
        """Returns the score of each token. Raises UnsupportedModel unless there is one for each."""
        found = self._list("scores", float)
        if len(found) != len(self.tokens) or not all(map(math.isfinite, found)):
            raise self.header.unsupported(f"{_KEY}scores", "must be a number for each token")
        return found

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a setting. Raises UnsupportedModel unless it is true or false."""
        found = self.header.metadata.get(_KEY + name, default)
        if not isinstance(found, bool):
            raise self.header.unsupported(_KEY + name, "must be true or false")
        return found

    def roles(self) -> dict[str, str]:
        """Returns the special tokens by their names in transformers, such as "eos_token". Old files
        give the role of padding to a word: it stays one. Raises UnsupportedModel for an id that no
        token has."""
        found = {}
        for role, key in _ROLES.items():
            index = self.header.metadata.get(f"{_KEY}{key}_token_id")
            if index is None:
                continue
            if type(index) is not int or not 0 <= index < len(self.tokens):
                raise self.header.unsupported(f"{_KEY}{key}_token_id", "no token has it")
            if not self.types or self.types[index] != _NORMAL:
                found[f"{role}_token"] = self.tokens[index]
        return found

    def _list(self, name: str, kind: type) -> list[Any]:
        found = self.header.metadata.get(_KEY + name, [])
        if not isinstance(found, list) or not all(type(each) is kind for each in found):
            raise self.header.unsupported(_KEY + name, f"must be a list of {kind.__name__}")
        return found


def _byte_level(vocabulary: Vocabulary) -> tuple[Any, bool]:
    """Returns BPE on bytes, and whether texts begin with the first token by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    header = vocabulary.header
    name = header.metadata.get(f"{_KEY}pre")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise header.unsupported(
            f"{_KEY}pre", f"supported are {', '.join(_SPLITS)}; serve it with --no-tokenizer"
        )
    merges = vocabulary.merges()
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=split.ignores_merges))
    steps: list[Any] = []
    if split.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.composes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(vocabulary: Vocabulary) -> tuple[Any, bool]:
    """Returns BPE as SentencePiece does it, of which files have scores in place of merges."""
    architecture = vocabulary.header.metadata[ARCHITECTURE]
    is_scored = architecture not in _IN_ORDER
    return (_with_scores if is_scored else _in_order)(vocabulary), True


def _with_scores(vocabulary: Vocabulary) -> Any:
    """Returns a tokenizer that merges the pair of the highest score first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = vocabulary.merges() or _derived(vocabulary.ids, vocabulary.scores())
    adds_space = vocabulary.flag("add_space_prefix", default=True)
    unknown = vocabulary.roles().get("unk_token")
    model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        _WORD_START, prepend_scheme="first" if adds_space else "never", split=False
    )
    steps = [decoders.Replace(_WORD_START, _SPACE), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(_SPACE, 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence([*steps, *strip])
    return backend


def _in_order(vocabulary: Vocabulary) -> Any:
    """Returns a tokenizer that merges to the token of the lowest id first, as the scores of its
    files do not say. Runs of spaces are stored as spaces."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    def spelled(token: str) -> str:
        return _WORD_START * len(token) if token and not token.strip(_SPACE) else token

    ids = {spelled(token): index for token, index in vocabulary.ids.items()}
    order = [-float(index) for index in ids.values()]
    unknown = vocabulary.roles().get("unk_token")
    model = models.BPE(
        ids, _derived(ids, order), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(_SPACE, _WORD_START)
    backend.pre_tokenizer = pre_tokenizers.Split(_SPACE, behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, _SPACE), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


_IN_ORDER = ("gemma2", "gemma3")
"""Architectures whose scores are not in the order of merges."""
_MAKERS: Mapping[str, Callable[[Vocabulary], tuple[Any, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""By `tokenizer.ggml.model`."""


def _derived(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that are a token together, in the order of transformers'
    `generate_merges`: by the score of the whole, then the longer left part first."""

    def parts() -> Iterator[tuple[float, int, int, str, str]]:
        for (token, _), score in zip(ids.items(), scores, strict=True):
            if len(token) > MAX_DERIVED_CHARS:
                continue
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            found = [(left, right) for left, right in pairs if left in ids and right in ids]
            for left, right in sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]])):
                yield -score, -len(left), -len(right), left, right

    ordered = sorted(parts(), key=lambda each: each[:3])
    return [(left, right) for *_, left, right in ordered]


def _add_tokens(backend: Any, vocabulary: Vocabulary) -> None:
    """Adds the tokens that are found in texts as a whole, special ones and others."""
    from tokenizers import AddedToken

    kinds = vocabulary.types or [_NORMAL] * len(vocabulary.tokens)
    roles = set(vocabulary.roles().values())
    special, others = [], []
    for token, kind in zip(vocabulary.tokens, kinds, strict=True):
        if not token:
            continue
        if kind in (_CONTROL, _UNKNOWN) or token in roles:
            special.append(AddedToken(token, normalized=False))
        elif kind == _USER_DEFINED and backend.token_to_id(token) is not None:
            others.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(others)


def _add_ends(backend: Any, vocabulary: Vocabulary, *, adds_bos: bool) -> None:
    """Adds the tokens that each text begins and ends with."""
    from tokenizers import processors

    roles = vocabulary.roles()
    flags = {"bos_token": adds_bos, "eos_token": False}
    added = [
        roles[role]
        for role, default in flags.items()
        if vocabulary.flag(f"add_{role}", default=default) and role in roles
    ]
    if not added:
        return
    first = added[:1] if roles.get("bos_token") == added[0] else []
    last = added[len(first) :]
    single = [*first, "$A", *last]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{each}:1" for each in (*first, "$B", *last))],
        special_tokens=[(each, vocabulary.ids[each]) for each in dict.fromkeys(added)],
    )


def _tokenizer_config(vocabulary: Vocabulary) -> str:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **vocabulary.roles(),
        "clean_up_tokenization_spaces": False,
    }
    header = vocabulary.header
    length = header.metadata.get(f"{header.metadata.get(ARCHITECTURE)}.context_length")
    if type(length) is int:
        config["model_max_length"] = length
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
