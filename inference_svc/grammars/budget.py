"""A bound on the tokens of an answer's thoughts: where it is reached, the tokens that end them are
forced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """Thoughts of at most `max_tokens` tokens, between the tokens `begin` and the token `end`; the
    tokens `after` are forced, too. `is_begun`: the prompt has begun them."""

    max_tokens: int
    begin: tuple[int, ...]
    end: int
    after: tuple[int, ...] = ()
    is_begun: bool = False


class Thinking:
    """The thoughts of one sequence, as far as it is generated. `next_token` is the token that must
    come next, None for any. Thoughts that begin again go on with the same budget."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._is_thinking = budget.is_begun
        self._num_tokens = 0
        self._num_begun = 0
        """How many tokens of the begin have come."""
        self._forced: tuple[int, ...] = ()
        self._check()

    @property
    def next_token(self) -> int | None:
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        """Takes the next token of the answer."""
        budget = self._budget
        self._forced = self._forced[1:]
        if not self._is_thinking:
            if token != budget.begin[self._num_begun]:
                self._num_begun = 0
            self._num_begun += token == budget.begin[self._num_begun]
            if self._num_begun == len(budget.begin):
                self._is_thinking, self._num_begun = True, 0
        elif token == budget.end:
            self._is_thinking = False
            return
        else:
            self._num_tokens += 1
        self._check()

    def _check(self) -> None:
        if self._is_thinking and self._num_tokens >= self._budget.max_tokens:
            self._forced = (self._budget.end, *self._budget.after)
