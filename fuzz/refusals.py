"""What refusals promise: the kind that the reader documents, which can be answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inference_svc.errors import CorruptImage, StoreUnavailable
from servicekit.errors import FailedPrecondition, ServiceError


@contextmanager
def refused(*kinds: type[ServiceError]) -> Iterator[None]:
    """Lets refusals of these kinds pass, if they can be answered: a culprit named, and text that
    UTF-8 can carry."""
    try:
        yield
    except kinds as error:
        _check_answer(error)


def _check_answer(error: ServiceError) -> None:
    named = (FailedPrecondition, CorruptImage, StoreUnavailable)  # of what was asked for
    assert error.subject or isinstance(error, named), "names no culprit"
    for text in (error.message, error.subject, error.reason):
        assert len(text.encode()) < 16_384
