"""What can go wrong in the inference service, without a word about transport.

InferenceError
 ├─ Unauthenticated      no token, or one that this server does not know
 ├─ PermissionDenied     the token's roles may not do this
 ├─ InvalidRequest       the caller's argument, named by `subject`
 ├─ DuplicateRequest     a running request has this id
 ├─ AdapterNotFound      the reference resolves to nothing
 ├─ AdapterUnusable      the adapter exists, and this model cannot serve it
 ├─ AdapterUnavailable   it did not become resident in time
 ├─ StoreUnavailable     the adapter store does not answer
 ├─ CorruptImage         pulled bytes fail their hash
 ├─ QueueFull            too many requests wait; `retry_after_s` says when to come back
 ├─ NoRoom               what is asked for would pin or occupy more than there is
 ├─ ProfileRunning       steps are being traced for somebody else
 ├─ NoSteps              no step ran that could be traced
 ├─ Draining             the server drains
 └─ EngineFailed         our bug: the step raised

UnsupportedModel         at start: a config that changes the maths in a way we do not compute
InvalidSetting           at start or reload: a setting, or the file it names, cannot be used

All of them cross process borders by pickle.
"""

from __future__ import annotations

from typing import Any


class InferenceError(Exception):
    """An error to be reported to the caller; `subject` names the culprit."""

    reason = "INFERENCE_ERROR"

    def __init__(self, message: str, *, subject: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.subject, self.retry_after_s)


def _rebuild(
    kind: type[InferenceError], message: str, subject: str, retry_after_s: float
) -> InferenceError:
    return kind(message, subject=subject, retry_after_s=retry_after_s)


class Unauthenticated(InferenceError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(InferenceError):
    reason = "PERMISSION_DENIED"


class InvalidRequest(InferenceError):
    reason = "INVALID_ARGUMENT"


class DuplicateRequest(InferenceError):
    reason = "DUPLICATE_REQUEST_ID"


class AdapterNotFound(InferenceError):
    reason = "ADAPTER_NOT_FOUND"


class AdapterUnusable(InferenceError):
    reason = "ADAPTER_UNUSABLE"


class AdapterUnavailable(InferenceError):
    reason = "ADAPTER_UNAVAILABLE"


class StoreUnavailable(InferenceError):
    reason = "STORE_UNAVAILABLE"


class CorruptImage(InferenceError):
    reason = "CORRUPT_IMAGE"


class QueueFull(InferenceError):
    reason = "QUEUE_FULL"


class NoRoom(InferenceError):
    reason = "NO_ROOM"


class ProfileRunning(InferenceError):
    reason = "PROFILE_RUNNING"


class NoSteps(InferenceError):
    reason = "NO_STEPS"


class Draining(InferenceError):
    reason = "DRAINING"


class EngineFailed(InferenceError):
    reason = "ENGINE_FAILED"


class UnsupportedModel(Exception):
    """The model directory holds something this decoder does not compute; the message names it."""


class InvalidSetting(ValueError):
    """A setting, or the file that it names, cannot be used; the message names setting and key."""
