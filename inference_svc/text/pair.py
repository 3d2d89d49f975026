"""Pairs of texts, as cross-encoders read them: one prompt, in which special tokens separate both.

A pair that is too long is cut as transformers' rule `longest_first` does it: the longer text loses
tokens until both have as many, and then both do; the tokenizer's own tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inference_svc.text.cut import Kept
from servicekit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts of one prompt; `fields` are the caller's names of them."""

    first: str
    second: str
    fields: tuple[str, str] = ("prompt", "prompt")


class Encoded(NamedTuple):
    """The tokens of a prompt. Of a pair `second_start` is the index from which token types are 1;
    0: all are 0."""

    token_ids: tuple[int, ...]
    second_start: int = 0


class PairTokens(NamedTuple):
    """A pair's tokens with the type of each, 0 or 1, and the text that each is of: 0, 1, or None
    for the tokenizer's own."""

    token_ids: Sequence[int]
    types: Sequence[int]
    texts: Sequence[int | None]

    def encoded(self, max_tokens: int, kept: Kept | None) -> Encoded:
        """Returns the tokens, at most so many if some are `kept`. Raises InvalidArgument where the
        tokenizer's own are too many already, or types have another order than 0 before 1."""
        places: Sequence[int] = range(len(self.token_ids))
        if kept is not None and len(places) > max_tokens:
            places = self._kept_places(max_tokens, kept)
        types = [self.types[place] for place in places]
        second_start = types.index(1) if 1 in types else 0
        first = second_start or len(types)
        if types != [0] * first + [1] * (len(types) - first):
            raise InvalidArgument(
                "the tokenizer gives a pair of texts other token types than 0 for the "
                "first and 1 for the second: no model is served that reads these",
                subject="prompt",
            )
        return Encoded(tuple(self.token_ids[place] for place in places), second_start)

    def _kept_places(self, max_tokens: int, kept: Kept) -> list[int]:
        own = [place for place, text in enumerate(self.texts) if text is None]
        places = [[place for place, of in enumerate(self.texts) if of == text] for text in (0, 1)]
        room = max_tokens - len(own)
        if room < 0:
            raise InvalidArgument(
                f"a pair of texts has {len(own)} tokens of the tokenizer's own, more than "
                f"{max_tokens}",
                subject="prompt",
            )
        counts = shortened(len(places[0]), len(places[1]), room)
        for each, count in zip(places, counts, strict=True):
            own += each[:count] if kept is Kept.FIRST else each[len(each) - count :]
        return sorted(own)


def shortened(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of a pair are kept, of two texts of so many tokens that may have
    `room` together, by the rule `longest_first` of the tokenizers library."""
    if first + second <= room:
        return first, second
    shorter, longer = sorted((first, second))
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = shorter + room % 2
    return (longer, shorter) if first > second else (shorter, longer)
