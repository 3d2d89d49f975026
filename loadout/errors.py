"""Errors that the client raises: one class per reaction of a caller. Catch LoadoutError for all."""

from __future__ import annotations

from typing import Any


class LoadoutError(Exception):
    """An error of a call.

    Args:
        message: The error in words, for people.
        code: Name of the gRPC status, such as "NOT_FOUND".
        reason: Stable identifier for programs, such as "ADAPTER_NOT_FOUND"; "" if there is none.
        subject: The cause: a field, file, tensor or config key; "" if there is none.
        retry_after_s: Seconds after which a retry may succeed; None: the service did not say.
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
    """An argument is invalid; `subject` names it."""


class NotFound(LoadoutError):
    """There is no such adapter, version, digest or uploaded image."""


class AlreadyExists(LoadoutError):
    """A running request has this `request_id`."""


class FailedPrecondition(LoadoutError):
    """The adapter exists but cannot be served, or is not as expected."""


class Conflict(LoadoutError):
    """The name does not point to the digest that the caller requires."""


class OutOfRange(LoadoutError):
    """The requested history is gone: list again."""


class ResourceExhausted(LoadoutError):
    """The queue is full or a limit is reached; `retry_after_s` says when to retry."""


class Unauthenticated(LoadoutError):
    """The token is missing, or the service does not know it."""


class PermissionDenied(LoadoutError):
    """The token does not allow the call."""


class DataLoss(LoadoutError):
    """Stored or pulled bytes fail their hash."""


class NotLoaded(LoadoutError):
    """A pushed version is recorded, but a replica, named by `subject`, cannot load it."""


class Unavailable(LoadoutError):
    """The service answered that it, its store or the adapter is unavailable."""


class StreamLost(LoadoutError):
    """The connection ended before the response did."""


class DeadlineExceeded(LoadoutError):
    """The call took longer than `timeout_s`."""


class Cancelled(LoadoutError):
    """This client or the server's shutdown cancelled the call."""


class ServerError(LoadoutError):
    """A fault of the service; its log has the cause."""
