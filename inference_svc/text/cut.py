"""Prompts that are too long: the most tokens that a call allows, and the end that is kept."""

from __future__ import annotations

import enum
from dataclasses import dataclass

KEPT_TIMES = 2
"""How often as many characters as fit are tokenised of a text that is cut: where it ends in the
middle of a word, its last tokens are others."""
WHOLE_TIMES = 8
"""How often as many characters as the context holds may a text have that is cut, if a tokenizer
leaves out so many that its kept end has too few tokens."""


class Kept(enum.Enum):
    """The tokens of a prompt that is too long which are kept, besides the tokenizer's own."""

    FIRST = "first"
    LAST = "last"

    def text(self, text: str, num_chars: int) -> str:
        """Returns so many characters of a text, or all of a shorter one."""
        if len(text) <= num_chars:
            return text
        return text[:num_chars] if self is Kept.FIRST else text[-num_chars:]


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The most tokens of each prompt of a call, in addition to the context's limit; 0: no more
    limits. `kept` None: a longer prompt is refused, in words with `why`."""

    max_tokens: int = 0
    kept: Kept | None = None
    why: str = "fit into the context"

    def cut(self, token_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Returns so many of the tokens, of longer ones that may be cut."""
        if self.kept is None or len(token_ids) <= num_tokens:
            return token_ids
        if self.kept is Kept.FIRST:
            return token_ids[:num_tokens]
        return token_ids[len(token_ids) - num_tokens :]


NO_LIMIT = PromptLimit()
