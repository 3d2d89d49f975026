"""A Hugging Face tokenizer: text and chat to token ids and back, and facts about its vocabulary."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.text.chat_template import ChatTemplate
from inference_svc.text.prompt import ChatMessage
from servicekit.errors import InvalidArgument

IMPORT_BYTES = 32 << 20
BYTES_PER_JSON_BYTE = 12
BYTES_PER_MODEL_BYTE = 100
MAX_REASON_CHARS = 300
"""How much is repeated of what transformers says of a tokenizer that it cannot load."""
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
    configuration, whose import takes seconds and loads what transformers' models compute with."""
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
    """Returns {} for what AutoTokenizer has to find fault with."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Tokenizer:
    """A Hugging Face fast tokenizer, thread-safe.

    Raises UnsupportedModel when the directory holds none that loads without code of its own.
    """

    def __init__(self, model_dir: Path) -> None:
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
                f"no tokenizer loads from {model_dir}, whose files are broken or of a kind that "
                f"transformers cannot read: {reason}"
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModel(
                f"the tokenizer in {model_dir} is not a fast one: it needs a tokenizer.json"
            )
        self._hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # The file may contain truncation and padding of the training; prompts get neither.
        self._backend.no_truncation()
        self._backend.no_padding()
        # Computed at start: with a large vocabulary it takes too long for the first request.
        self.visible_ids = self._find_visible_ids()
        self.byte_ids = self._find_byte_ids()
        self.is_byte_level = "ByteLevel" in repr(self._backend.decoder)
        self.max_chars_per_token = self._find_max_chars_per_token()
        self._chat_template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def _find_visible_ids(self) -> frozenset[int]:
        """Returns the tokens that `decode` includes: neither special nor unknown. (A model's
        vocabulary may be padded beyond its tokenizer's.)"""
        added = self._backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(self._backend.get_vocab(with_added_tokens=True).values()) - special

    def _find_byte_ids(self) -> frozenset[int]:
        """Returns the tokens such as <0xE4> that stand for one byte: a run of them is decoded as
        one."""
        if "ByteFallback" not in repr(self._backend.decoder):
            return frozenset()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        return frozenset(i for piece, i in vocab.items() if _BYTE_TOKEN.fullmatch(piece))

    def _find_max_chars_per_token(self) -> int:
        """Returns the length of the longest token's text. (One character may be several tokens; no
        token but that of a run of whitespace, which some tokenizers leave out, is of more.)"""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)))
        return longest if self._backend.normalizer is None else COMPOSED_CHARS * longest

    def name_of(self, token_id: int) -> str:
        """Returns the vocabulary's string; "" for an id that only the model has."""
        return self._backend.id_to_token(token_id) or ""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`, with Hugging Face's default special tokens."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[ChatMessage], max_chars: int, max_seconds: float
    ) -> list[int]:
        """Returns the token ids of a conversation under the model's chat template, up to where the
        assistant's answer begins. Raises like `ChatTemplate.render`."""
        if self._chat_template is None:
            raise InvalidArgument("this model has no chat template", subject="chat")
        text = self._chat_template.render(tuple(messages), max_chars, max_seconds)
        # The template writes the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The backend directly: the wrapper changes shared padding state on every call. As a batch:
        # only this method of the backend lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` without special tokens, and without the optional "clean
        up" of spaces, which would change the model's text."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))
