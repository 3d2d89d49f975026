"""A vocabulary of ASCII's characters and a few words, and random answers that follow masks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from inference_svc.grammars.lanes.lane import Row
from inference_svc.grammars.vocabulary import Vocabulary, make_vocabulary

WORDS = ('{"', '":', '", "', "true", "null", "12", "  ", "\n", 'a"', "é", "日")
END = 127
"""The model's end token."""
SPECIAL = 126


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    shown: bytes


class Pieces:
    """Tokens of ASCII, of each byte above it, and of words; SPECIAL is `<|call|>`."""

    def of(self, token_id: int) -> Piece:
        if token_id == SPECIAL:
            return Piece("<|call|>", b"")
        if token_id < 128:
            return Piece(chr(token_id), bytes([token_id]))
        if token_id < 256:
            return Piece("\ufffd", bytes([token_id]))
        text = WORDS[token_id - 256] if token_id - 256 < len(WORDS) else ""
        return Piece(text, text.encode())


SIZE = 256 + len(WORDS) + 3
"""The model has more rows than its tokenizer has tokens."""


def vocabulary() -> Vocabulary:
    return make_vocabulary(Pieces(), SIZE, (END,))


def allowed(row: Row) -> list[int]:
    """Returns the tokens that a row's mask allows."""
    mask = row.mask
    assert mask is not None
    return [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]


def choose(row: Row, chosen: random.Random) -> int | None:
    """Returns a random token that may come next; None: the answer ends."""
    tokens = allowed(row)
    assert tokens or row.may_end
    if row.may_end and (not tokens or chosen.random() < 0.5):
        return None
    return chosen.choice(tokens)


def text_of(tokens: list[int]) -> str:
    return b"".join(Pieces().of(each).shown for each in tokens).decode()
