"""What refusals promise: the kind that the reader documents, which can be answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inference_svc.errors import CorruptImage, StoreUnavailable
from servicekit.errors import FailedPrecondition

NAMED = (FailedPrecondition, CorruptImage, StoreUnavailable)
"""Refusals of what was asked for, which need not name it once more."""


class Tally:
    """How many of the readers of this process have accepted what they were given. A target whose
    inputs are all refused tests nothing but its first check."""

    accepted = 0
    refused = 0


TALLY = Tally()


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Lets refusals of these kinds pass, if they can be answered: a culprit named, and text that
    UTF-8 can carry."""
    try:
        yield
    except kinds as error:
        TALLY.refused += 1
        check_answer(error)
    else:
        TALLY.accepted += 1


def check_answer(error: Any) -> None:
    """Checks that a refusal names a culprit, and is text that UTF-8 can carry."""
    assert error.subject or isinstance(error, NAMED), "names no culprit"
    reason = getattr(error, "reason", "")
    for text in (getattr(error, "message", str(error)), error.subject, reason):
        assert len(text.encode()) < 16_384
