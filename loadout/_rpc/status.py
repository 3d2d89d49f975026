"""Turns gRPC's errors into the client's, with the google.rpc details."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from loadout import errors
from loadout._rpc.unreachable import explain
from loadout.errors import LoadoutError

DETAILS_KEY = "grpc-status-details-bin"

ERROR_OF_CODE: dict[grpc.StatusCode, type[LoadoutError]] = {
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNKNOWN: errors.ServerError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.OUT_OF_RANGE: errors.OutOfRange,
    grpc.StatusCode.UNIMPLEMENTED: errors.ServerError,
    grpc.StatusCode.INTERNAL: errors.ServerError,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
}

LOST_CODES = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
)
"""The codes of a dead peer: directly, through Envoy or nginx, and through HAProxy."""


@dataclass(frozen=True, slots=True)
class Details:
    """The details of an error besides code and message."""

    reason: str = ""
    subject: str = ""
    retry_after_s: float | None = None
    from_service: bool = False
    """Whether a service answered: ours send a google.rpc.Status with every error, a proxy or a lost
    connection does not."""


def from_rpc_error(error: Any, service: str) -> LoadoutError:
    """Returns the client's error for a grpc.RpcError that is also a call (both APIs raise such) to
    `service`, such as "the adapter store".

    UNAVAILABLE, INTERNAL and UNKNOWN that no service answered become StreamLost.
    """
    code = error.code()
    details = read_details(error.trailing_metadata() or ())
    kind = ERROR_OF_CODE.get(code, errors.ServerError)
    if code in LOST_CODES and not details.from_service:
        kind = errors.StreamLost
    message = error.details() or code.name
    if not details.from_service:
        message = explain(message, service)
    return kind(
        message,
        code=code.name,
        reason=details.reason,
        subject=details.subject,
        retry_after_s=details.retry_after_s,
    )


def read_details(metadata: Iterable[tuple[str, str | bytes]]) -> Details:
    """Reads ErrorInfo, BadRequest and RetryInfo; details that do not parse count as absent."""
    blob = next((value for key, value in metadata if key == DETAILS_KEY), None)
    if blob is None:
        return Details()
    reason, subject, retry_after_s = "", "", None
    try:
        parts = status_pb2.Status.FromString(blob).details
        for part in parts:
            if part.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo.FromString(part.value)
                reason, subject = info.reason, subject or info.metadata.get("subject", "")
            elif part.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                request = error_details_pb2.BadRequest.FromString(part.value)
                if request.field_violations:
                    subject = request.field_violations[0].field
            elif part.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo.FromString(part.value)
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    except DecodeError:
        return Details()
    return Details(reason, subject, retry_after_s, from_service=True)
