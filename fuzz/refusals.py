"""Checks refusals: they have a kind that the reader documents, and can be sent as an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inference_svc.errors import CorruptImage, StoreUnavailable
from servicekit.errors import FailedPrecondition

NAMED = (FailedPrecondition, CorruptImage, StoreUnavailable)
"""Refusals of the requested object, which need not repeat its name."""


class Tally:
    """Counts the inputs that readers of this process accepted and refused.

    A target that refuses every input tests only its first check.
    """

    accepted = 0
    refused = 0


TALLY = Tally()


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Allows refusals of these kinds if they name a culprit and their text is valid UTF-8."""
    try:
        yield
    except kinds as error:
        TALLY.refused += 1
        check_answer(error)
    else:
        TALLY.accepted += 1


def check_answer(error: Any) -> None:
    """Checks that a refusal names a culprit and its text is valid UTF-8."""
    assert error.subject or isinstance(error, NAMED), "the refusal names no culprit"
    reason = getattr(error, "reason", "")
    for text in (getattr(error, "message", str(error)), error.subject, reason):
        assert len(text.encode()) < 16_384
