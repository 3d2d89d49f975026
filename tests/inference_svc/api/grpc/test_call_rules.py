"""Every answer says how busy the server is, and a refusal whether another replica may take it."""

from __future__ import annotations

import pytest

from inference_svc import errors
from inference_svc.api.grpc.servicer import call_rules
from inference_svc.api.load_report import LOAD_HEADER, REFUSED_HEADER
from servicekit.errors import Draining, ServiceError
from tests.support.error_kinds import GENERAL, kinds_of

RULES = call_rules(lambda: "TEXT load", max_model_len=64)


def test_an_answer_says_the_load() -> None:
    assert RULES.trailers(None) == ((LOAD_HEADER, "TEXT load"),)


@pytest.mark.parametrize("kind", [*GENERAL, *kinds_of(errors)], ids=lambda kind: kind.__name__)
def test_a_refusal_may_send_callers_elsewhere(kind: type[ServiceError]) -> None:
    trailers = dict(RULES.trailers(kind("too busy")))
    assert trailers[LOAD_HEADER] == "TEXT load"
    goes_elsewhere = kind in (Draining, errors.QueueFull, errors.Asleep)
    assert trailers.get(REFUSED_HEADER) == (kind.reason if goes_elsewhere else None)
