"""How a model embeds: the tokens that it pools, and the lengths and prompts that it has."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Pooling(enum.Enum):
    """The tokens of a prompt whose hidden states are averaged; NONE: each token has a vector."""

    LAST = "last"
    MEAN = "mean"
    FIRST = "first"
    NONE = "none"

    def positions(self, num_prompt: int) -> tuple[int, int]:
        """Returns the first of the pooled tokens, and the end of them."""
        if self is Pooling.LAST:
            return num_prompt - 1, num_prompt
        return 0, 1 if self is Pooling.FIRST else num_prompt


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """How a model embeds: vectors of `size` numbers, pooled and normalised in this way unless a
    request says otherwise. `dimensions` are the lengths that a vector may be cut to; none: any.
    `prompts` are texts that a request may have put before its inputs, by name, and
    `default_prompt` the name of the one that it has otherwise. An input has at most `max_tokens`, 0
    for as many as the context, and is in lower case if the model `lowercases`. `refusal` says why
    the server does not embed; "": it does."""

    size: int = 0
    pooling: Pooling = Pooling.LAST
    is_normalised: bool = True
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int = 0
    lowercases: bool = False
    refusal: str = ""


NO_EMBEDDINGS = EmbeddingRule(refusal="it has no hidden states here")
"""The rule of a server of which nothing is known."""
