"""The bytes of a model's tokens, which a grammar is matched with."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol


class Piece(Protocol):
    @property
    def shown(self) -> bytes: ...
    @property
    def text(self) -> str: ...


class AnyPieces(Protocol):
    def of(self, token_id: int) -> Piece: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, packed for processes that match grammars: `num_tokens` of them.

    A mask has a bit for each, and one more.
    """

    num_tokens: int
    packed: str

    @property
    def mask_bytes(self) -> int:
        """The size of a mask, a multiple of four."""
        return 4 * (self.num_tokens // 32 + 1)


def make_vocabulary(pieces: AnyPieces, vocab_size: int, end_ids: Collection[int]) -> Vocabulary:
    """Returns the vocabulary of a model. Tokens that add nothing to a text match only where a
    grammar names them; `end_ids` never do, because they end an answer wherever they come."""
    lengths, special, texts = [], [], []
    for token_id in range(vocab_size):
        piece = pieces.of(token_id)
        data = piece.shown
        if token_id in end_ids:
            data = b""
        elif not data and piece.text:
            data = piece.text.encode()
            special.append(token_id)
        lengths.append(len(data))
        texts.append(data)
    content = {
        "lengths": lengths,
        "special": special,
        "bytes": base64.b85encode(b"".join(texts)).decode(),
    }
    data = zlib.compress(json.dumps(content).encode(), 1)
    return Vocabulary(vocab_size, base64.b85encode(data).decode())


def unpack(packed: str) -> tuple[list[bytes], list[int]]:
    """Returns the bytes of each token, and the ids of special tokens."""
    content: Any = json.loads(zlib.decompress(base64.b85decode(packed)))
    data, tokens, place = base64.b85decode(content["bytes"]), [], 0
    for length in content["lengths"]:
        tokens.append(data[place : place + length])
        place += length
    return tokens, content["special"]
