"""Decodes token ids to text incrementally: the pieces joined equal the decoding of all tokens."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD = 16
"""Most tokens that are held while they end in U+FFFD; only the last few can still become text."""
MAX_CHARACTER_BYTES = 4


class TokenDecoder(Protocol):
    """The part of a tokenizer that decoding needs."""

    @property
    def visible_ids(self) -> Container[int]: ...
    @property
    def byte_ids(self) -> Container[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Incremental decoding of one sequence.

    A token's text depends on the tokens before it (the first one loses its leading space, for
    example), so new tokens are decoded behind the piece last returned, tokens [_prefix, _read), and
    that piece's own text is cut off again. Text is held back while it may still change: behind a
    byte token, whose run is valid or invalid as one, and while it ends in U+FFFD, which is how an
    incomplete character decodes.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""

    @property
    def holds_text(self) -> bool:
        return self._read < len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is now certain: of one token, of several, or ""."""
        decoder = self._decoder
        if token_id not in decoder.visible_ids:
            return ""
        self._token_ids.append(token_id)
        if token_id in decoder.byte_ids:
            return ""
        text = decoder.decode(self._token_ids[self._prefix :])
        if text.endswith(REPLACEMENT):
            is_long = len(self._token_ids) - self._read > MAX_HELD
            return self._push_certain(text) if is_long else ""
        return self._advance(text, len(self._token_ids))

    def flush(self) -> str:
        """Returns the text that is still held back; called once, at the end."""
        end = len(self._token_ids)
        return self._advance(self._decoder.decode(self._token_ids[self._prefix :]), end)

    def _push_certain(self, text: str) -> str:
        """Returns the text of a long run of broken bytes, except for the last few, which may begin
        a character.

        Where decoding in two parts gives the same `text`, no character spans the cut. Without
        this, each token would decode all of them again.
        """
        decode, end = self._decoder.decode, len(self._token_ids)
        for cut in range(end - 1, end - MAX_CHARACTER_BYTES - 1, -1):
            head = decode(self._token_ids[self._prefix : cut])
            if head + decode(self._token_ids[cut:]) == text:
                return self._advance(head, cut)
        return ""

    def _advance(self, text: str, end: int) -> str:
        """Returns the new part of `text`, the decoding of tokens [_prefix, end)."""
        known = self._prefix_text
        if len(text) <= len(known) or not text.startswith(known):
            return ""
        # Only [_prefix:] is ever read again.
        self._prefix, self._read = self._read, end
        self._prefix_text = self._decoder.decode(self._token_ids[self._prefix : end])
        return text[len(known) :]
