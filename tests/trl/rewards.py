"""The job of the training run: answer a word with its first letter, over and over. The process of
rollouts imports this."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from loadout.demo.adapters import MODEL

MAX_TOKENS = 8


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def reward_of(prompts: list[Any], completion_ids: list[list[int]], **unused: Any) -> list[float]:
    """Returns the share of each answer's tokens that are the word's first letter."""
    letters = [prompt[-1]["content"][0] for prompt in prompts]
    firsts = tokenizer()(letters, add_special_tokens=False)["input_ids"]
    pairs = zip(completion_ids, firsts, strict=True)
    return [answer.count(first) / MAX_TOKENS for answer, [first] in pairs]
