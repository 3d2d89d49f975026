"""Prices of choosing and scoring tokens, in tokens of a prompt.

Computing a token takes two operations for each weight that it passes. Log probabilities, and the
search for the most likely tokens, walk over the vocabulary once for each position: with a small
model and a large vocabulary, or many most likely tokens, they cost many times as much as the token.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.core import Sequence
from inference_svc.results.base import Work

WALK_OPERATIONS = 4_000
"""The cost of log probabilities for each token of the vocabulary, as operations of products: a
processor, as a device, reads and writes it some times meanwhile."""
SORT_OPERATIONS = 60_000
"""The cost of sorting for each token of the vocabulary."""
LISTED_OPERATIONS = 60_000
"""The cost of each returned most likely token: it is found, copied and sent."""


@dataclass(frozen=True, slots=True)
class Prices:
    """In tokens of a prompt: a position's logits, its log probabilities, sorting its vocabulary,
    and each of its most likely tokens that is returned. All are 0 where nothing is charged."""

    logits: float = 0.0
    logprobs: float = 0.0
    sort: float = 0.0
    listed: float = 0.0

    def of_prompt(self, sequence: Sequence) -> float:
        """Returns the price of a token of its prompt, computed and, if asked for, scored."""
        if sequence.num_scored >= sequence.num_prompt:
            return 1.0
        return 1.0 + self.logits + self._of(sequence.request.wanted.prompt_work)

    def of_choice(self, sequence: Sequence) -> float:
        """Returns the price of a generated token besides its computation and its logits."""
        request = sequence.request
        price = self.sort if sequence.is_sorted else 0.0
        wanted = request.wanted
        if wanted.options:
            work = wanted.token_work
            if wanted.depends_on_cut and request.sampling.is_cut:
                work = wanted.cut_token_work
            price += self._of(work)
        return price

    def _of(self, work: Work) -> float:
        walks, sorts, listed = work
        return self.logprobs * walks + self.sort * sorts + self.listed * listed


FREE = Prices()
