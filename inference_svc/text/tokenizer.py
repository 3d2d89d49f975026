"""Text and chat to token ids; facts about the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.text.prompt import ChatMessage
from servicekit.errors import InvalidArgument

IMPORT_BYTES = 32 << 20
BYTES_PER_JSON_BYTE = 12
BYTES_PER_MODEL_BYTE = 100
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def tokenizer_bytes(model_dir: Path) -> int:
    """About what a `Tokenizer` of it will take, as measured of vocabularies of up to 150,000: the
    library that reads it, and the vocabulary in the tables of ours and of its own."""
    for name, factor in (
        ("tokenizer.json", BYTES_PER_JSON_BYTE),
        ("tokenizer.model", BYTES_PER_MODEL_BYTE),
    ):
        if (model_dir / name).is_file():
            return IMPORT_BYTES + factor * (model_dir / name).stat().st_size
    return IMPORT_BYTES


class Tokenizer:
    """A Hugging Face fast tokenizer. Every method may be called from any thread.

    Raises UnsupportedModel when the directory holds none that loads without code of its own.
    """

    def __init__(self, model_dir: Path) -> None:
        # Here and not above: the import takes seconds, and tests of the front need no transformers.
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(model_dir), local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except Exception as error:
            raise UnsupportedModel(f"no tokenizer loads from {model_dir}: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModel(f"the tokenizer in {model_dir} is not a fast one")
        self._hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A file may say how its training cut and filled texts; a prompt stays as it is.
        self._backend.no_truncation()
        self._backend.no_padding()
        # Found now: a large vocabulary takes longer than the first token may.
        self.visible_ids = self._find_visible_ids()
        self.byte_ids = self._find_byte_ids()
        self.is_byte_level = "ByteLevel" in repr(self._backend.decoder)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def _find_visible_ids(self) -> frozenset[int]:
        """Tokens that `decode` does not leave out: neither special nor unknown. (A model's
        vocabulary may be padded beyond its tokenizer's.)"""
        added = self._backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(self._backend.get_vocab(with_added_tokens=True).values()) - special

    def _find_byte_ids(self) -> frozenset[int]:
        """Tokens such as <0xE4> that stand for one byte: a run of them is decoded as a whole."""
        if "ByteFallback" not in repr(self._backend.decoder):
            return frozenset()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        return frozenset(i for piece, i in vocab.items() if _BYTE_TOKEN.fullmatch(piece))

    def name_of(self, token_id: int) -> str:
        """As the vocabulary writes it; "" for an id that only the model knows."""
        return self._backend.id_to_token(token_id) or ""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that Hugging Face adds by default."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation under the model's chat template, up to where the
        assistant's answer begins. Raises InvalidArgument."""
        if not self._hf.chat_template:
            raise InvalidArgument("this model has no chat template", subject="chat")
        conversation = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self._hf.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates raise whatever they like about a conversation
            raise InvalidArgument(
                f"the chat template refuses these messages: {error}", subject="chat"
            ) from error
        # The template writes the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Straight from the backend: the wrapper changes shared padding state on every call. As a
        # batch: alone among the backend's ways to encode, it lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens, and without the optional "clean up" of
        spaces, which would change characters that the model wrote."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))
