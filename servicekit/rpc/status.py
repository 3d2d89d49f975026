"""Errors as gRPC statuses.

Every answer that is not OK carries a google.rpc.Status with an ErrorInfo (a stable reason and the
culprit), for the caller's own mistakes a BadRequest naming the field, file or tensor, and a
RetryInfo where waiting helps.
"""

from __future__ import annotations

import errno
import math
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from servicekit import errors

CODES: dict[type[errors.ServiceError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
"""Kinds derived from these have their code. Everything else is a bug and answers INTERNAL."""

INTERNAL_MESSAGE = "internal error"
"""All that a caller learns of our bugs; the log has the rest."""


_OUT_OF_FILES = ("the server has too many files open", "OUT_OF_FILES")
_DISK_FULL = ("the server's disk is full", "DISK_FULL")
_OUT_OF_MEMORY = ("the server is out of memory", "OUT_OF_MEMORY")
_OUT_OF_THREADS = ("the server has too many threads", "OUT_OF_THREADS")
_OUT_OF = {
    errno.EMFILE: _OUT_OF_FILES,
    errno.ENFILE: _OUT_OF_FILES,
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
    errno.ENOMEM: _OUT_OF_MEMORY,
}
NO_THREAD = "can't start new thread"
"""How Python begins the message of the error, of no type of its own."""
RETRY_SECONDS = 1.0


def service_error(error: Exception) -> Exception:
    """Returns ResourceExhausted for an error that says that this process or its machine is out of
    something, which is no bug; any other as it is."""
    found = _OUT_OF.get(error.errno or 0) if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        found = _OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and str(error).startswith(NO_THREAD):
        found = _OUT_OF_THREADS
    if found is None:
        return error
    message, reason = found
    return errors.ResourceExhausted(
        f"{message}: try again later", reason=reason, retry_after_s=RETRY_SECONDS
    )


def code_for(error: type[BaseException]) -> grpc.StatusCode:
    """The code that a call ends with when its handler raises an error of this type."""
    kinds = (CODES[kind] for kind in error.__mro__ if kind in CODES)
    return next(kinds, grpc.StatusCode.INTERNAL)


def to_status(error: Exception, domain: str) -> status_pb2.Status:
    """The status of an error with its details; `domain` is the service's, for ErrorInfo."""
    code = code_for(type(error))
    number = code.value[0]
    if not isinstance(error, errors.ServiceError) or code is grpc.StatusCode.INTERNAL:
        return status_pb2.Status(code=number, message=INTERNAL_MESSAGE)
    packed = [_pack(each) for each in _details(error, code, domain)]
    return status_pb2.Status(code=number, message=error.message, details=packed)


def _details(error: errors.ServiceError, code: grpc.StatusCode, domain: str) -> list[Any]:
    metadata = {"subject": error.subject} if error.subject else {}
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=domain, metadata=metadata)
    ]
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = error_details_pb2.BadRequest.FieldViolation(
            field=error.subject, description=error.message, reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[field]))
    if isinstance(error, errors.QuotaExceeded):
        quota = error_details_pb2.QuotaFailure.Violation(
            subject=error.subject, description=error.message
        )
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    if error.retry_after_s > 0:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(math.ceil(error.retry_after_s * 1e9))
        details.append(retry)
    return details


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
