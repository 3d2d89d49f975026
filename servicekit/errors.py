"""The errors of a service, independent of transport.

The general kinds are gRPC's status codes. A service derives its own from them and so inherits their
code; `reason` tells its own apart.

ServiceError
 ├─ InvalidArgument      an argument is invalid; `subject` names it
 ├─ Unauthenticated      the token is missing or unknown
 ├─ PermissionDenied     the token's roles or tenants do not allow the call
 ├─ NotFound             no such object
 ├─ AlreadyExists        an object of this name exists
 ├─ FailedPrecondition   a precondition of the call does not hold
 ├─ Aborted              the object was changed meanwhile
 ├─ OutOfRange           the position is outside the stored data
 ├─ ResourceExhausted    a limit is reached; with RetryInfo, a later retry may succeed
 │   ├─ QuotaExceeded    the tenant has reached a quota; `subject` names it
 │   └─ ShareExceeded    the tenant has used its share of a resource; `subject` names it
 ├─ DeadlineExceeded     the call waited too long
 │   └─ ReaderStalled    the client reads too slowly
 ├─ Unavailable          a dependency of the service does not answer
 │   └─ Draining         the service is shutting down; retry at another replica, or later
 ├─ DataLoss             stored or received bytes fail their hash
 └─ Internal             a bug; the service's log has the details

InvalidSetting, a FailedPrecondition, is raised at start and reload only: a setting, or the file
that it names, cannot be used.

All of them can be pickled.
"""

from __future__ import annotations

from typing import Any


class ServiceError(Exception):
    """An error to be reported to the caller.

    `subject` names the culprit (a field, file, tensor or config key); `reason` is a stable
    UPPER_SNAKE word for programs; `retry_after_s` > 0 says when trying again may succeed.
    """

    reason = "SERVICE_ERROR"

    def __init__(
        self,
        message: str,
        *,
        subject: str = "",
        reason: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject
        self.retry_after_s = retry_after_s
        if reason is not None:
            self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            self.message,
            self.subject,
            self.reason,
            self.retry_after_s,
        )


def _rebuild(
    kind: type[ServiceError], message: str, subject: str, reason: str, retry_after_s: float
) -> ServiceError:
    return kind(message, subject=subject, reason=reason, retry_after_s=retry_after_s)


class InvalidArgument(ServiceError):
    reason = "INVALID_ARGUMENT"


class Unauthenticated(ServiceError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(ServiceError):
    reason = "PERMISSION_DENIED"


class NotFound(ServiceError):
    reason = "NOT_FOUND"


class AlreadyExists(ServiceError):
    reason = "ALREADY_EXISTS"


class FailedPrecondition(ServiceError):
    reason = "FAILED_PRECONDITION"


class InvalidSetting(FailedPrecondition):
    reason = "SETTING_INVALID"


class Aborted(ServiceError):
    reason = "ABORTED"


class OutOfRange(ServiceError):
    reason = "OUT_OF_RANGE"


class ResourceExhausted(ServiceError):
    reason = "RESOURCE_EXHAUSTED"


class QuotaExceeded(ResourceExhausted):
    reason = "QUOTA_EXCEEDED"


class ShareExceeded(ResourceExhausted):
    reason = "SHARE_EXCEEDED"


class DeadlineExceeded(ServiceError):
    reason = "DEADLINE_EXCEEDED"


class ReaderStalled(DeadlineExceeded):
    reason = "READER_STALLED"


class Unavailable(ServiceError):
    reason = "UNAVAILABLE"


class Draining(Unavailable):
    reason = "DRAINING"


class DataLoss(ServiceError):
    reason = "DATA_LOSS"


class Internal(ServiceError):
    reason = "INTERNAL"
