"""Pairs of texts: their tokens and types, and how they are cut, as by the tokenizers library."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from inference_svc.text.cut import Kept
from inference_svc.text.pair import Encoded, PairTokens
from servicekit.errors import InvalidArgument

LETTERS = "abcdefghijkl"
BERT = processors.TemplateProcessing(
    single="<s> $A </s>",
    pair="<s> $A </s> $B:1 </s>:1",
    special_tokens=[("<s>", 1), ("</s>", 2)],
)
ROBERTA = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))


def tokenizer_with(processor: Any) -> tokenizers.Tokenizer:
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {each: 3 + i for i, each in enumerate(LETTERS)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if processor is not None:
        made.post_processor = processor
    return made


@pytest.mark.parametrize("kept", Kept)
@pytest.mark.parametrize("processor", [BERT, ROBERTA, None], ids=["bert", "roberta", "none"])
def test_a_pair_is_cut_as_by_the_library(processor: Any, kept: Kept) -> None:
    """The longer text first, of every pair of short lengths to every length."""
    tokenizer = tokenizer_with(processor)
    direction = "right" if kept is Kept.FIRST else "left"
    own = len(tokenizer.encode("", "").ids)
    for first in range(1, len(LETTERS)):
        for second in range(1, len(LETTERS)):
            texts = LETTERS[:first], LETTERS[::-1][:second]
            tokenizer.no_truncation()
            whole = tokenizer.encode(*texts)
            tokens = PairTokens(whole.ids, whole.type_ids, whole.sequence_ids)
            for most in range(own + 2, len(whole.ids) + 2):
                tokenizer.enable_truncation(most, strategy="longest_first", direction=direction)
                wanted = tokenizer.encode(*texts)
                found = tokens.encoded(most, kept)
                assert list(found.token_ids) == wanted.ids
                types = [int(0 < found.second_start <= at) for at in range(len(wanted.ids))]
                assert types == wanted.type_ids


def test_a_pair_is_whole_unless_it_may_be_cut() -> None:
    tokens = PairTokens((1, 3, 2, 4, 2), (0, 0, 0, 1, 1), (None, 0, None, 1, None))
    assert tokens.encoded(2, None) == Encoded((1, 3, 2, 4, 2), 3)
    with pytest.raises(InvalidArgument, match="3 tokens of the tokenizer's own, more than 2"):
        tokens.encoded(2, Kept.FIRST)


def test_other_types_are_refused() -> None:
    tokens = PairTokens((1, 3, 2, 4, 2), (1, 0, 0, 1, 1), (None, 0, None, 1, None))
    with pytest.raises(InvalidArgument, match="other token types than 0 for the first"):
        tokens.encoded(9, None)
