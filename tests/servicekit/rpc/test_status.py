"""Errors as statuses, with their details."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

import adapter_store.errors
import inference_svc.errors
from servicekit import errors
from servicekit.rpc.status import CODES, INTERNAL_MESSAGE, code_for, service_error, to_status
from tests.support.error_kinds import GENERAL, kinds_of
from tests.support.machine.limits import no_more_threads

GENERAL_CODES = {
    "InvalidArgument": "INVALID_ARGUMENT",
    "Unauthenticated": "UNAUTHENTICATED",
    "PermissionDenied": "PERMISSION_DENIED",
    "NotFound": "NOT_FOUND",
    "AlreadyExists": "ALREADY_EXISTS",
    "FailedPrecondition": "FAILED_PRECONDITION",
    "Aborted": "ABORTED",
    "OutOfRange": "OUT_OF_RANGE",
    "ResourceExhausted": "RESOURCE_EXHAUSTED",
    "QuotaExceeded": "RESOURCE_EXHAUSTED",
    "ShareExceeded": "RESOURCE_EXHAUSTED",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "ReaderStalled": "DEADLINE_EXCEEDED",
    "Unavailable": "UNAVAILABLE",
    "Draining": "UNAVAILABLE",
    "DataLoss": "DATA_LOSS",
    "Internal": "INTERNAL",
}
STORE_CODES = {
    "InvalidAdapter": "INVALID_ARGUMENT",
    "IncompatibleAdapter": "FAILED_PRECONDITION",
    "Conflict": "ABORTED",
    "CallerGone": "ABORTED",
    "RevisionTooOld": "OUT_OF_RANGE",
    "LimitExceeded": "RESOURCE_EXHAUSTED",
    "DiskFull": "RESOURCE_EXHAUSTED",
    "Overloaded": "RESOURCE_EXHAUSTED",
    "UploadStalled": "DEADLINE_EXCEEDED",
    "SourceUnavailable": "UNAVAILABLE",
    "CatalogUnavailable": "UNAVAILABLE",
    "BlobLost": "UNAVAILABLE",
    "CorruptData": "DATA_LOSS",
}
INFERENCE_CODES = {
    "TemplateTimeout": "INVALID_ARGUMENT",
    "GrammarRefused": "INVALID_ARGUMENT",
    "AdapterNotFound": "NOT_FOUND",
    "DuplicateRequest": "ALREADY_EXISTS",
    "AdapterUnusable": "FAILED_PRECONDITION",
    "TokenizerChanged": "FAILED_PRECONDITION",
    "ChatTemplateInvalid": "FAILED_PRECONDITION",
    "NotFinite": "FAILED_PRECONDITION",
    "NoRoom": "FAILED_PRECONDITION",
    "ProfileRunning": "FAILED_PRECONDITION",
    "Interrupted": "FAILED_PRECONDITION",
    "CannotWake": "FAILED_PRECONDITION",
    "ImageFetchFailed": "FAILED_PRECONDITION",
    "ImageNotFound": "NOT_FOUND",
    "QueueFull": "RESOURCE_EXHAUSTED",
    "OutOfDeviceMemory": "RESOURCE_EXHAUSTED",
    "NoSteps": "DEADLINE_EXCEEDED",
    "AdapterUnavailable": "UNAVAILABLE",
    "StoreUnavailable": "UNAVAILABLE",
    "Asleep": "UNAVAILABLE",
    "CorruptImage": "DATA_LOSS",
    "EngineFailed": "UNAVAILABLE",
}


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
    for kind, code in GENERAL_CODES.items():
        assert code_for(getattr(errors, kind)).name == code
    assert GENERAL_CODES.keys() == {kind.__name__ for kind in GENERAL}


@pytest.mark.parametrize(
    ("module", "codes"),
    [(adapter_store.errors, STORE_CODES), (inference_svc.errors, INFERENCE_CODES)],
    ids=["store", "inference"],
)
def test_codes_of_a_services_own_errors(module: ModuleType, codes: dict[str, str]) -> None:
    """A caller sees these: an error under another parent would change what clients retry."""
    assert {kind.__name__: code_for(kind).name for kind in kinds_of(module)} == codes


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


def test_a_process_without_threads_left_is_no_bug() -> None:
    with no_more_threads(), pytest.raises(RuntimeError) as raised:
        threading.Thread(target=print).start()
    found = service_error(raised.value)
    assert isinstance(found, errors.ResourceExhausted)
    assert (found.reason, found.retry_after_s > 0) == ("OUT_OF_THREADS", True)
    other = RuntimeError("a bug")
    assert service_error(other) is other
