import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.text.detokenizer import MAX_HELD, REPLACEMENT, Detokenizer
from inference_svc.text.tokenizer import Tokenizer
from tests.support.models.tokenizers import KINDS as TOKENIZERS
from tests.support.models.tokenizers import save_tokenizer

KINDS = ["byte_level", "unigram", "metaspace", "chars"]
TEXT = st.text(
    st.sampled_from("ab  .,\n\tThequickowing éß日本語の한Ж😀🎉👩\u200d\u0301")
    | st.characters(exclude_categories=["Cs"]),
    max_size=40,
)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_examples", [50, pytest.param(150, marks=pytest.mark.long)])
def test_pieces_of_text_join_to_its_decoding(
    tokenizers: dict[str, Tokenizer], kind: str, max_examples: int
) -> None:
    tokenizer = tokenizers[kind]

    @settings(max_examples=max_examples, deadline=None)
    @given(TEXT)
    def join(text: str) -> None:
        token_ids = tokenizer.encode(text)
        assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)

    join()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_texts", [500, pytest.param(1500, marks=pytest.mark.long)])
def test_pieces_of_random_tokens_join_to_their_decoding(
    tokenizers: dict[str, Tokenizer], kind: str, num_texts: int
) -> None:
    """Including invalid bytes, special tokens in the middle, and unknown ids."""
    tokenizer = tokenizers[kind]
    rng = random.Random(7)
    for _ in range(num_texts):
        token_ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randrange(30))]
        assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids), token_ids


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_no_piece_has_a_broken_character(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    text = "x 😀 語 한 ψ 日本 qu 👩‍👩‍👧 ."
    tokenizer = tokenizers[kind]
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert max(map(len, pieces[:-1])) < len(text) / 2, "text is held back no longer than it must"


def ids_of_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """The tokens of single bytes by their byte: those of byte fallback, or of the alphabet."""
    token_ids = tokenizer.byte_ids or range(tokenizer.vocab_size)
    found = {tokenizer.pieces.of(token_id).data: token_id for token_id in token_ids}
    return {byte: found[bytes([byte])] for byte in range(256) if bytes([byte]) in found}


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_every_hangul_syllable_is_streamed(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """ai-dynamo/dynamo#12630, sglang#31598: of three tokens of one byte each, between other texts
    and as one run."""
    tokenizer = tokenizers[kind]
    of_byte = ids_of_bytes(tokenizer)
    other = tokenizer.backend.token_to_id("a")
    syllables = [chr(code) for code in range(0xAC00, 0xD7A4)]
    spelled = [[of_byte[byte] for byte in syllable.encode()] for syllable in syllables]
    token_ids = [token_id for each in spelled for token_id in (*each, other)]
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == "".join(f"{syllable}a" for syllable in syllables)
    assert max(map(len, pieces)) <= 2, "each comes as soon as it is whole"
    run = [token_id for each in spelled for token_id in each]
    assert "".join(pieces_of(tokenizer, run)) == "".join(syllables)


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
@pytest.mark.parametrize("is_token", [True, False])
def test_a_stream_goes_on_after_a_replacement_character(
    kind: str, is_token: bool, tmp_path: Path
) -> None:
    """sglang-omni#2124: of a token whose own text it is, or of its three bytes."""
    backend = TOKENIZERS[kind]()
    if is_token:
        backend.add_tokens([REPLACEMENT])
    tokenizer = Tokenizer(save_tokenizer(backend, tmp_path))
    token_ids = tokenizer.encode(f"a{REPLACEMENT}b")
    *streamed, held = pieces_of(tokenizer, token_ids)
    assert "".join(streamed) == tokenizer.decode(token_ids)
    assert held == "", "nothing waits for the end"
    token_ids = tokenizer.encode(f"{REPLACEMENT}b" * 50 + REPLACEMENT * 50)
    *streamed, held = pieces_of(tokenizer, token_ids)
    assert "".join(streamed) + held == tokenizer.decode(token_ids)
    is_byte_run = kind == "unigram" and not is_token
    assert len(held) <= (50 if is_byte_run else MAX_HELD + 1)


def test_incomplete_last_character_is_replaced(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("a😀")[:-1]
    *pieces, last = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == "a"
    assert last == REPLACEMENT


def test_spaces_before_punctuation_are_kept(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    assert "".join(pieces_of(tokenizer, tokenizer.encode("a . b , do n't"))) == "a . b , do n't"


def test_cost_per_token_does_not_grow(tokenizers: dict[str, Tokenizer]) -> None:
    """Counted, not timed: the decoder never sees more than the last few tokens."""

    class Counting:
        visible_ids, byte_ids = tokenizers["chars"].visible_ids, tokenizers["chars"].byte_ids
        longest = 0

        def decode(self, token_ids: list[int]) -> str:
            self.longest = max(self.longest, len(token_ids))
            return tokenizers["chars"].decode(token_ids)

    counting = Counting()
    detokenizer = Detokenizer(counting)
    for token_id in tokenizers["chars"].encode("the quick brown fox " * 20):
        detokenizer.push(token_id)
    assert counting.longest <= 3


def test_long_runs_of_broken_bytes_have_bounded_cost(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    parts = [tokenizer.encode(char) for char in "😀語éa"]
    rng = random.Random(3)
    longest = 0

    class Counting:
        visible_ids, byte_ids = tokenizer.visible_ids, tokenizer.byte_ids

        def decode(self, token_ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return tokenizer.decode(token_ids)

    for _ in range(50):
        # First halves of characters: never complete, and some that the next token completes.
        token_ids = [rng.choice(rng.choice(parts)[:-1] or [parts[0][0]]) for _ in range(80)]
        token_ids += [*parts[1], *parts[0][:-1]]
        detokenizer = Detokenizer(Counting())
        pieces = [*map(detokenizer.push, token_ids), detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(token_ids)
        assert pieces[-2] == "", "an unfinished character is held back"
    assert longest <= 48
