"""Errors cross process borders by pickle."""

from __future__ import annotations

import pickle

import pytest

import adapter_store.errors
import inference_svc.errors
from servicekit.errors import ServiceError
from tests.support.error_kinds import AT_START, GENERAL, kinds_of

KINDS = [*GENERAL, *kinds_of(adapter_store.errors), *kinds_of(inference_svc.errors), *AT_START]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_copy_is_equal(kind: type[ServiceError]) -> None:
    error = kind("what is wrong", subject="r", reason="EXACT", retry_after_s=1.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == "what is wrong"


def test_reasons_are_distinct() -> None:
    assert len({kind.reason for kind in KINDS}) == len(KINDS)
