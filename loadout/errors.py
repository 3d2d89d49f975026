"""The errors of a call, one class per reaction of a caller.

LoadoutError                 catch this for all of them
 ├─ InvalidArgument          the caller's argument, named by `subject`
 ├─ NotFound                 no such adapter, version, digest
 ├─ AlreadyExists            a running request has this request_id
 ├─ FailedPrecondition       the adapter exists and cannot be served, or is not what was expected
 ├─ Conflict                 the name points elsewhere than the caller required
 ├─ OutOfRange               the requested history is gone: list again
 ├─ ResourceExhausted        queue full or a limit reached; `retry_after_s` says when to retry
 ├─ Unauthenticated          no token was sent, or one that the service does not know
 ├─ PermissionDenied         this token may not do that
 ├─ DataLoss                 stored or pulled bytes fail their hash
 ├─ NotLoaded                a push is recorded, and a replica, named by `subject`, cannot load it
 ├─ Unavailable              the service answered that it, its store or the adapter is unavailable
 ├─ StreamLost               the connection ended before the response did
 ├─ DeadlineExceeded         `timeout_s` passed
 ├─ Cancelled                by this client or by the server's shutdown
 └─ ServerError              the service's own fault; its log has the cause
"""

from __future__ import annotations

from typing import Any


class LoadoutError(Exception):
    """An error of a call.

    `code` is the gRPC status ("NOT_FOUND"), `reason` a stable UPPER_SNAKE word for programs
    ("ADAPTER_NOT_FOUND"), `subject` the culprit (a field, file, tensor or config key), both ""
    when the service named none. `retry_after_s` is set when the service asked to retry later.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        reason: str = "",
        subject: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.subject = subject
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in _FIELDS}
        return _rebuild, (type(self), self.message, fields)


_FIELDS = ("code", "reason", "subject", "retry_after_s")


def _rebuild(kind: type[LoadoutError], message: str, fields: dict[str, Any]) -> LoadoutError:
    return kind(message, **fields)


class InvalidArgument(LoadoutError):
    pass


class NotFound(LoadoutError):
    pass


class AlreadyExists(LoadoutError):
    pass


class FailedPrecondition(LoadoutError):
    pass


class Conflict(LoadoutError):
    pass


class OutOfRange(LoadoutError):
    pass


class ResourceExhausted(LoadoutError):
    pass


class Unauthenticated(LoadoutError):
    pass


class PermissionDenied(LoadoutError):
    pass


class DataLoss(LoadoutError):
    pass


class NotLoaded(LoadoutError):
    pass


class Unavailable(LoadoutError):
    pass


class StreamLost(LoadoutError):
    pass


class DeadlineExceeded(LoadoutError):
    pass


class Cancelled(LoadoutError):
    pass


class ServerError(LoadoutError):
    pass
