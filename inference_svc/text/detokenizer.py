"""Token ids to text, piece by piece: the pieces joined are the decoding of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD = 16
"""Tokens that end in U+FFFD; of more than these, only the last few can still become text."""
MAX_CHARACTER_BYTES = 4


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def visible_ids(self) -> frozenset[int]: ...
    @property
    def byte_ids(self) -> frozenset[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Incremental decoding of one sequence.

    How a token reads depends on those before it (the first one loses its leading space, say), so
    new tokens are decoded behind the piece last returned, tokens [_prefix, _read), and that
    piece's own text is cut off again. Text is held back while it may still change: behind a byte
    token, whose run is valid or invalid as a whole, and while it ends in U+FFFD, which is how an
    incomplete character decodes.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""

    def push(self, token_id: int) -> str:
        """Text that is now certain; often one token's, sometimes "", sometimes several tokens'."""
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
        """What is still held back, decoded as it stands. Call it once, at the end."""
        end = len(self._token_ids)
        return self._advance(self._decoder.decode(self._token_ids[self._prefix :]), end)

    def _push_certain(self, text: str) -> str:
        """Broken bytes without end: all but the last few, which may begin a character.

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
        """What `text`, the decoding of tokens [_prefix, end), has beyond what was returned."""
        known = self._prefix_text
        if len(text) <= len(known) or not text.startswith(known):
            return ""
        # Only [_prefix:] is ever read again.
        self._prefix, self._read = self._read, end
        self._prefix_text = self._decoder.decode(self._token_ids[self._prefix : end])
        return text[len(known) :]
