from __future__ import annotations

import pytest

from inference_svc.text.pieces import Piece, Pieces
from inference_svc.text.tokenizer import Tokenizer

KINDS = ["byte_level", "unigram", "metaspace", "chars"]
TEXT = "the quick brown 日本 fox 😀 é"


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    pieces = Pieces(tokenizer)
    token_ids = [i for i in tokenizer.encode(TEXT) if i in tokenizer.visible_ids]
    data = b"".join(pieces.of(token_id).data for token_id in token_ids)
    assert data.decode().strip() == tokenizer.decode(token_ids).strip()


def test_a_token_within_a_character_has_its_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "unigram"):
        tokenizer = tokenizers[kind]
        pieces = [Pieces(tokenizer).of(i) for i in tokenizer.encode("😀")]
        broken = [piece for piece in pieces if piece.text == "\ufffd"]
        assert broken, kind
        assert all(len(piece.data) == 1 and piece.data[0] >= 0x80 for piece in broken)


def test_a_token_keeps_its_space(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, name in (("unigram", "▁the"), ("byte_level", "Ġthe")):
        tokenizer = tokenizers[kind]
        token_id = tokenizer._backend.token_to_id(name)
        assert token_id is not None
        assert Pieces(tokenizer).of(token_id) == Piece(" the", b" the"), kind


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_named_and_unknown_ids_are_nothing(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    pieces = Pieces(tokenizers[kind])
    eos = tokenizers[kind]._backend.token_to_id("</s>")
    assert pieces.of(eos) == Piece("</s>", b"</s>")
    assert pieces.of(10**6) == Piece("", b"")
    assert pieces.of(eos) is pieces.of(eos)
