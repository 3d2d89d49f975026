"""Prompts that are cut by real tokenizers: texts, pairs, and documents that a chat is about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from inference_svc.text.chat import Chat, ChatMessage
from inference_svc.text.cut import WHOLE_TIMES, Kept, PromptLimit
from inference_svc.text.encoder import Encoder, Terms
from inference_svc.text.pair import Pair
from inference_svc.text.prompt import Prompt, PromptEncoder, Question, Text
from inference_svc.text.tokenizer import Tokenizer
from servicekit.errors import InvalidArgument
from servicekit.work_budget import WorkBudget
from tests.support.models import tokenizer_files as files


def cut(
    encoder: Encoder, max_model_len: int, prompt: Prompt, limit: PromptLimit
) -> tuple[int, ...]:
    async def body() -> tuple[int, ...]:
        prompts = PromptEncoder(encoder, max_model_len, 1000, WorkBudget("work", 1.0))
        try:
            terms = Terms(num_answer_tokens=0, limit=limit)
            return (await prompts.encode(prompt, terms)).token_ids
        finally:
            prompts.close()

    return asyncio.run(body())


@pytest.fixture(scope="module")
def word_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = files.word_piece()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return Tokenizer(files.save(tokenizer, tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("kept", Kept)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("filling", [" " * 1500, " " * 3000, "q" * 3000])
def test_a_prompt_that_is_cut_keeps_words_that_are_far_from_its_end(
    word_piece: Tokenizer, filling: str, adds: bool, kept: Kept
) -> None:
    """BERT's tokenizer leaves out white space, and has one token for a long word that it does not
    know."""
    words = "the quick brown fox jumps over the lazy dog"
    text = f"{filling} {words}" if kept is Kept.FIRST else f"{words} {filling}"
    own = word_piece.encode(text, add_special_tokens=False)
    num_own = 4 if adds else 6
    own = own[:num_own] if kept is Kept.FIRST else own[-num_own:]
    assert set(own) & set(word_piece.encode(words, add_special_tokens=False))
    found = cut(word_piece, 100, Text(text, adds), PromptLimit(6, kept))
    assert found == ((0, *own, 1) if adds else tuple(own))


@pytest.mark.parametrize("kept", Kept)
def test_a_pair_that_is_cut_keeps_both_texts(word_piece: Tokenizer, kept: Kept) -> None:
    """Also a query behind white space that takes all the characters of a document that is long."""
    space, query, document = " " * 3000, "the quick fox", "the lazy dog jumps over " * 200
    texts = (f"{space}{query}", document)
    if kept is Kept.LAST:
        texts = (f"{query}{space}", document)
    whole = word_piece.encode_pair(*texts)
    found = cut(word_piece, 40, Pair(*texts), PromptLimit(20, kept))
    assert found == whole.encoded(20, kept).token_ids
    assert set(word_piece.encode(query, add_special_tokens=False)) <= set(found)


def ask(document: str) -> Chat:
    return Chat((ChatMessage("user", f"Judge {document}"),))


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("num_chars", [9_600, 10_800, 60_000])
def test_a_document_that_is_judged_is_cut_however_long_it_is(
    tmp_path: Path, num_chars: int
) -> None:
    """Though the template's text may have no more characters than the context."""
    tokenizer = files.with_tokens(files.byte_level(), ["sixteen letters."])
    encoder = Tokenizer(files.save(tokenizer, tmp_path, TEMPLATE))
    assert encoder.max_chars_per_token == 16
    document = ("the quick brown fox " * 3000)[:num_chars]
    found = cut(encoder, 512, Question(document, ask), PromptLimit(kept=Kept.FIRST))
    assert 500 < len(found) <= 512
    assert encoder.decode(found).startswith("user: Judge the quick brown fox")


@pytest.mark.parametrize("kept", Kept)
def test_a_document_is_judged_by_words_that_are_far_from_its_end(
    tmp_path: Path, kept: Kept
) -> None:
    encoder = Tokenizer(files.save(files.word_piece(), tmp_path, TEMPLATE))
    space, words = " " * (2 * 60 * encoder.max_chars_per_token), "the quick fox " * 100
    document = f"{space}{words}" if kept is Kept.FIRST else f"{words}{space}"
    found = cut(encoder, 60, Question(document, ask), PromptLimit(kept=kept))
    assert 50 < len(found) <= 60


@pytest.mark.parametrize("kept", Kept)
@pytest.mark.parametrize("make", [files.byte_level, files.byte_fallback])
def test_a_document_is_cut_between_characters(
    tmp_path: Path, make: Callable[[], Any], kept: Kept
) -> None:
    """One whose bytes are several tokens is kept or left out."""
    encoder = Tokenizer(files.save(make(), tmp_path, TEMPLATE))
    emoji = "\N{GRINNING FACE}"
    found = cut(encoder, 512, Question(emoji * 400, ask), PromptLimit(kept=kept))
    assert 500 < len(found) <= 512
    assert set(encoder.decode(found).partition("Judge ")[2].strip()) == {emoji}
    num_whole = len(encoder.encode(emoji * 3, add_special_tokens=False))
    num_each = num_whole - len(encoder.encode(emoji * 2, add_special_tokens=False))
    assert num_each > 1
    for num_fewer in range(1, num_whole):
        num_kept = len(encoder.shortened(emoji * 3, num_fewer, kept))
        assert num_kept < 3
        assert num_kept * num_each <= num_whole - num_fewer < (num_kept + 2) * num_each


def test_a_prompt_that_is_cut_has_few_characters_without_tokens(word_piece: Tokenizer) -> None:
    """They are tokenised up to a multiple of the context's characters."""
    most = WHOLE_TIMES * 6 * word_piece.max_chars_per_token
    text, limit = Text("a".rjust(most)), PromptLimit(6, Kept.FIRST)
    assert len(cut(word_piece, 6, text, limit)) == 3
    message = rf"has {most + 1} .* are 2 tokens: the server cuts no longer text than of {most} to 6"
    with pytest.raises(InvalidArgument, match=message) as caught:
        cut(word_piece, 6, Text("a".rjust(most + 1)), limit)
    assert caught.value.subject == "prompt"
