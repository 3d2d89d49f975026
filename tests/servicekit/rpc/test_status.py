"""Errors as statuses, with their details."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from servicekit import errors
from servicekit.rpc.status import CODES, INTERNAL_MESSAGE, code_for, to_status
from tests.servicekit.error_kinds import GENERAL


class Mine(errors.NotFound):
    reason = "MINE"


def details_of(error: Exception) -> dict[str, Any]:
    found = {}
    for packed in to_status(error, "test.domain").details:
        name = packed.type_url.rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name).FromString(packed.value)
    return found


def test_every_kind_has_a_code() -> None:
    children = {kind for kind in GENERAL if kind.__bases__ == (errors.ServiceError,)}
    assert set(CODES) == children
    assert code_for(Mine) is grpc.StatusCode.NOT_FOUND
    assert code_for(errors.Draining) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("kind", [*GENERAL, Mine], ids=lambda kind: kind.__name__)
def test_reason_subject_and_retry(kind: type[errors.ServiceError]) -> None:
    error = kind("what is wrong", subject="r", retry_after_s=1.5)
    status = to_status(error, "test.domain")
    assert status.code == code_for(kind).value[0]
    if kind is errors.Internal:
        assert (status.message, list(status.details)) == (INTERNAL_MESSAGE, [])
        return
    assert status.message == "what is wrong"
    details = details_of(error)
    info = details["ErrorInfo"]
    assert (info.reason, info.domain) == (kind.reason, "test.domain")
    assert dict(info.metadata) == {"subject": "r"}
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1500
    assert ("BadRequest" in details) == (kind is errors.InvalidArgument)
    assert ("QuotaFailure" in details) == (kind is errors.QuotaExceeded)


def test_only_what_is_known_is_said() -> None:
    assert list(details_of(errors.ResourceExhausted("full"))) == ["ErrorInfo"]
    assert not details_of(errors.NotFound("gone"))["ErrorInfo"].metadata


def test_an_invalid_argument_names_the_field() -> None:
    error = errors.InvalidArgument("r: must be > 0", subject="r", reason="CONFIG_INVALID")
    [violation] = details_of(error)["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("r", "r: must be > 0")
    assert violation.reason == "CONFIG_INVALID"


@pytest.mark.parametrize("error", [ValueError("secret path"), errors.ServiceError("secret")])
def test_a_bug_answers_a_fixed_text(error: Exception) -> None:
    status = to_status(error, "test.domain")
    assert (status.code, status.message) == (grpc.StatusCode.INTERNAL.value[0], INTERNAL_MESSAGE)
