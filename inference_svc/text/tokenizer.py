"""A Hugging Face tokenizer: text and chat to token ids and back, and facts about its vocabulary."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.text.answers.families import PLAIN, AnswerSyntax
from inference_svc.text.chat import Chat
from inference_svc.text.chat_template import ChatTemplate, Renderer
from inference_svc.text.cut import Kept
from inference_svc.text.detokenizer import TokenDecoder
from inference_svc.text.pair import PairTokens
from inference_svc.text.pieces import Pieces
from servicekit.errors import InvalidArgument

TEMPLATE_FILE = "chat_template.json"
IMPORT_BYTES = 32 << 20
BYTES_PER_JSON_BYTE = 12
BYTES_PER_MODEL_BYTE = 100
MAX_REASON_CHARS = 300
"""How much is repeated of transformers' error for a tokenizer that it cannot load."""
COMPOSED_CHARS = 4
"""How many characters a normaliser composes into one at most: a letter and its marks."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def tokenizer_bytes(model_dir: Path) -> int:
    """Estimates the memory of a `Tokenizer`, as measured with vocabularies of up to 150,000 tokens:
    the library that loads it, and the vocabulary in its tables and ours."""
    for name, factor in (
        ("tokenizer.json", BYTES_PER_JSON_BYTE),
        ("tokenizer.model", BYTES_PER_MODEL_BYTE),
    ):
        if (model_dir / name).is_file():
            return IMPORT_BYTES + factor * (model_dir / name).stat().st_size
    return IMPORT_BYTES


def _config(model_dir: Path) -> Any:
    """Returns the fields of config.json that AutoTokenizer chooses a class by, if
    tokenizer_config.json names one. Otherwise None: it then chooses by the model's own class of
    configuration, whose import takes seconds and loads the libraries of transformers' models."""
    from transformers import PreTrainedConfig

    named = _read_json(model_dir / "tokenizer_config.json")
    fields = _read_json(model_dir / "config.json")
    if "tokenizer_class" not in named or "auto_map" in named or "model_type" not in fields:
        return None
    config = PreTrainedConfig(name_or_path=str(model_dir))
    for name in ("model_type", "model_name", "tokenizer_class"):
        if name in fields:
            setattr(config, name, fields[name])
    return config


def _read_json(path: Path) -> dict[str, Any]:
    """Returns {} for a file whose faults AutoTokenizer reports."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class BackendText:
    """Text to tokens and back by a backend of the `tokenizers` library. Thread-safe.

    `specials` are the texts of special tokens by their roles; `template` is None where there is no
    chat template. `end_ids` end an answer in addition to the model's; `answers` is how its answers
    are read. A pair's tokens have types if it `has_types`.
    """

    has_types = False

    def __init__(
        self,
        backend: Any,
        visible_ids: Container[int],
        byte_ids: Container[int],
        max_chars_per_token: int,
        specials: Mapping[str, str],
        template: Renderer | None,
        end_ids: tuple[int, ...] = (),
        answers: AnswerSyntax = PLAIN,
    ) -> None:
        self.backend = backend
        self.visible_ids = visible_ids
        self.byte_ids = byte_ids
        self.max_chars_per_token = max_chars_per_token
        self.specials = specials
        self.template = template
        self.end_ids = end_ids
        self.answers = answers
        self.is_byte_level = "ByteLevel" in repr(backend.decoder)
        self.pieces = Pieces(self)

    @property
    def renders_in_child(self) -> bool:
        """Whether its chats wait for a child process."""
        return self.template is not None and not isinstance(self.template, ChatTemplate)

    def name_of(self, token_id: int) -> str:
        """Returns the vocabulary's string; "" for an id that only the model has."""
        return self.backend.id_to_token(token_id) or ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`, with Hugging Face's default special tokens or without.

        As a batch: only this method of the backend lets other threads run meanwhile. The wrapper
        would change shared padding state on every call."""
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str) -> PairTokens:
        """Returns the tokens of two texts as one prompt, with Hugging Face's special tokens."""
        (made,) = self.backend.encode_batch_fast([(first, second)])
        types = made.type_ids if self.has_types else [0] * len(made.ids)
        return PairTokens(made.ids, types, made.sequence_ids)

    def shortened(self, text: str, num_fewer: int, kept: Kept) -> str:
        """Returns the text of all but so many of a text's tokens; "" if there are no others."""
        (made,) = self.backend.encode_batch([text], add_special_tokens=False)
        num_kept = len(made.ids) - num_fewer
        if num_kept <= 0:
            return ""
        # The tokens of one character's bytes all have its place: it goes with the first that does.
        if kept is Kept.FIRST:
            return text[: min(made.offsets[num_kept - 1][1], made.offsets[num_kept][0])]
        return text[max(made.offsets[num_fewer][0], made.offsets[num_fewer - 1][1]) :]

    def encode_chat(
        self, chat: Chat, max_chars: int, max_seconds: float, framed: Callable[[str], str] = str
    ) -> list[int]:
        """Returns the token ids of a conversation under the chat template, up to where the
        assistant's answer begins; `framed` puts frames around pictures in its text. Raises like
        `Renderer.render`."""
        if self.template is None:
            raise InvalidArgument("this model has no chat template", subject="chat")
        text = framed(self.template.render(chat, max_chars, max_seconds))
        return self.encode(text, add_special_tokens=chat.add_special_tokens)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with special ones."""
        return str(self.backend.decode(token_ids, skip_special_tokens=False))

    def special_id(self, marker: str) -> int | None:
        """Returns the id of a special token; None for a text that is none."""
        token_id: int | None = self.backend.token_to_id(marker)
        return None if token_id is None or token_id in self.visible_ids else token_id

    def showing(self, markers: Iterable[str]) -> TokenDecoder:
        """Returns a decoder that shows these special tokens, too."""
        found = map(self.special_id, markers)
        hidden = frozenset(each for each in found if each is not None)
        return _Showing(self, hidden) if hidden else self

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` without special tokens, and without the optional "clean
        up" of spaces, which would change the model's text."""
        return str(self.backend.decode(token_ids, skip_special_tokens=True))


class _Showing:
    """A text model's decoder that shows some special tokens."""

    def __init__(self, text: BackendText, shown: frozenset[int]) -> None:
        self._text = text
        self.visible_ids = _Either(text.visible_ids, shown)
        self.byte_ids = text.byte_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        visible = [each for each in token_ids if each in self.visible_ids]
        return str(self._text.backend.decode(visible, skip_special_tokens=False))


class _Either:
    def __init__(self, *parts: Container[int]) -> None:
        self._parts = parts

    def __contains__(self, token_id: object) -> bool:
        return any(token_id in part for part in self._parts)


class Tokenizer(BackendText):
    """A model's Hugging Face fast tokenizer.

    `tool_parser` is one of PARSERS, "none", or "auto": the chat template's. Raises UnsupportedModel
    when the directory holds none that loads without code of its own.
    """

    def __init__(self, model_dir: Path, tool_parser: str = "auto") -> None:
        # Imported here: it takes seconds, and tests of the frontend need no transformers.
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(model_dir),
                config=_config(model_dir),
                local_files_only=True,
                trust_remote_code=False,
                use_fast=True,
            )
        except Exception as error:
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", MAX_REASON_CHARS)
            raise UnsupportedModel(
                f"cannot load the tokenizer in {model_dir}: its files are damaged, or "
                f"transformers does not support them: {reason}"
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModel(
                f"the tokenizer in {model_dir} is not a fast one: it needs a tokenizer.json"
            )
        self.hf = tokenizer
        if not tokenizer.chat_template:  # older checkpoints have their processor's
            tokenizer.chat_template = _read_json(model_dir / TEMPLATE_FILE).get("chat_template")
        backend = tokenizer.backend_tokenizer
        # The file may contain truncation and padding of the training; prompts get neither.
        backend.no_truncation()
        backend.no_padding()
        specials = tokenizer.special_tokens_map
        template = None if not tokenizer.chat_template else make_template(tokenizer, specials)
        # Computed at start: with a large vocabulary it takes too long for the first request.
        vocabulary = backend.get_vocab(with_added_tokens=True)
        super().__init__(
            backend,
            _find_visible_ids(backend, vocabulary),
            _find_byte_ids(backend, vocabulary),
            max_chars_per_token(vocabulary, backend),
            specials,
            template,
            answers=AnswerSyntax.of(_sources(tokenizer), tool_parser),
        )
        self.tool_parser = tool_parser
        self.has_types = "token_type_ids" in tokenizer.model_input_names
        self.vocab_size = max(vocabulary.values()) + 1
        """The largest token id plus one."""


def make_template(hf: Any, specials: Mapping[str, str]) -> ChatTemplate:
    """Returns the chat template of a Hugging Face tokenizer, which may have another one for
    conversations with tools."""
    source, with_tools = hf.get_chat_template(), hf.get_chat_template(tools=[{}])
    other = None if with_tools == source else ChatTemplate(with_tools, specials)
    return ChatTemplate(source, specials, other)


def _sources(hf: Any) -> str:
    """Returns the texts of all chat templates."""
    if not hf.chat_template:
        return ""
    return "\n".join({hf.get_chat_template(): None, hf.get_chat_template(tools=[{}]): None})


def max_chars_per_token(texts: Iterable[str], backend: Any) -> int:
    """Returns the length of the longest token's text. (One character may be several tokens; no
    token except a run of whitespace, which some tokenizers leave out, is of more.)"""
    longest = max(map(len, texts))
    return longest if backend.normalizer is None else COMPOSED_CHARS * longest


def _find_visible_ids(backend: Any, vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Returns the tokens that `decode` includes: neither special nor unknown. (A model's
    vocabulary may be padded beyond its tokenizer's.)"""
    added = backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    return frozenset(vocabulary.values()) - special


def _find_byte_ids(backend: Any, vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Returns the tokens such as <0xE4> that stand for one byte: a run of them is decoded as
    one."""
    if "ByteFallback" not in repr(backend.decoder):
        return frozenset()
    return frozenset(i for piece, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(piece))
