"""Thoughts end at their budget: the tokens that must come next."""

from __future__ import annotations

import pytest

from inference_svc.grammars.budget import Thinking, ThoughtBudget

BEGIN, END, AFTER, OTHER = 1, 2, 3, 9


def forced(budget: ThoughtBudget, answer: list[int]) -> list[int | None]:
    """Returns the token that must come next, before each of an answer's and at its end."""
    thinking = Thinking(budget)
    found = [thinking.next_token]
    for token in answer:
        thinking.accept(token)
        found.append(thinking.next_token)
    return found


@pytest.mark.parametrize(
    ("budget", "answer", "expected"),
    [
        ((2, (BEGIN,), END), [BEGIN, OTHER, OTHER, END], [None, None, None, END, None]),
        ((0, (BEGIN,), END), [BEGIN, END, OTHER], [None, END, None, None]),
        ((1, (BEGIN,), END), [OTHER, OTHER, OTHER], [None] * 4),
        ((2, (BEGIN,), END), [BEGIN, OTHER, END, OTHER, OTHER], [None] * 6),
        ((1, (BEGIN,), END, (), True), [OTHER, END, OTHER], [None, END, None, None]),
        ((0, (BEGIN,), END, (AFTER, 4), True), [END, AFTER, 4, 9], [END, AFTER, 4, None, None]),
        # Begun again: what is left of the budget.
        ((1, (BEGIN,), END), [BEGIN, OTHER, END, BEGIN, END], [None, None, END, None, END, None]),
        # A begin of several tokens.
        ((0, (5, 6), END), [5, 5, 6, END, 6], [None, None, None, END, None, None]),
        ((0, (5, 6), END), [5, OTHER, 6], [None] * 4),
    ],
)
def test_thoughts_end_at_their_budget(
    budget: tuple[int, ...], answer: list[int], expected: list[int | None]
) -> None:
    assert forced(ThoughtBudget(*budget), answer) == expected
