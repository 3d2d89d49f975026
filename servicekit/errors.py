"""What can go wrong in a service, without a word about transport.

The general kinds are those of gRPC's status codes. A service derives its own from them and so
inherits their code; `reason` tells its own apart.

ServiceError
 ├─ InvalidArgument      the caller's argument, named by `subject`
 ├─ Unauthenticated      no token, or one that this service does not know
 ├─ PermissionDenied     the token's roles, or its tenants, do not allow this
 ├─ NotFound             no such object
 ├─ AlreadyExists        an object of this name exists
 ├─ FailedPrecondition   what the call requires does not hold
 ├─ Aborted              what the call is about was changed meanwhile
 ├─ OutOfRange           the position is outside what is stored
 ├─ ResourceExhausted    a limit is reached; `retry_after_s` > 0: trying again then may succeed
 │   ├─ QuotaExceeded    a limit of the tenant; `subject` names the quota
 │   └─ ShareExceeded    a tenant's share of something finite; `subject` names it
 ├─ DeadlineExceeded     what the call waited for did not come in time
 │   └─ ReaderStalled    a reader that took too little for too long
 ├─ Unavailable          something that the service needs does not answer
 │   └─ Draining         the service is shutting down: try another replica, or later
 ├─ DataLoss             stored or received bytes fail their hash
 └─ Internal             a bug; callers learn no more than that

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
