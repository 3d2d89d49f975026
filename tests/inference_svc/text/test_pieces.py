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


def test_part_of_a_character_has_its_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "unigram"):
        tokenizer = tokenizers[kind]
        pieces = [Pieces(tokenizer).of(i) for i in tokenizer.encode("😀")]
        broken = [piece for piece in pieces if piece.text == "\ufffd"]
        assert broken, kind
        assert b"".join(piece.data for piece in pieces).strip() == "😀".encode()


def test_token_keeps_its_space(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, space in (("unigram", "▁"), ("byte_level", "Ġ")):
        tokenizer = tokenizers[kind]
        vocabulary = tokenizer.backend.get_vocab()
        found = {
            name: i for name, i in vocabulary.items() if name[:1] == space and name[1:].isalpha()
        }
        assert found, kind
        for name, token_id in found.items():
            piece = Pieces(tokenizer).of(token_id)
            if name.isascii() or kind == "unigram":
                assert piece.text == f" {name[1:]}"
            assert piece.data.startswith(b" ")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_named_and_unknown_ids_are_empty(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    pieces = Pieces(tokenizers[kind])
    eos = tokenizers[kind].backend.token_to_id("</s>")
    assert pieces.of(eos) == Piece("</s>", b"</s>", b"")
    assert pieces.of(10**6) == Piece("", b"", b"")
    assert pieces.of(eos) is pieces.of(eos)
