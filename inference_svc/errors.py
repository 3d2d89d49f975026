"""The inference service's own errors, below the general kinds whose status code they have.

InvalidArgument
 └─ TemplateTimeout      the chat template takes too long for these messages
NotFound
 └─ AdapterNotFound      the reference resolves to nothing
AlreadyExists
 └─ DuplicateRequest     a running request has this id
FailedPrecondition
 ├─ AdapterUnusable      the adapter exists, and this model cannot serve it
 ├─ NoRoom               what is requested would pin or occupy more than there is
 └─ ProfileRunning       steps are being traced for another caller
ResourceExhausted
 ├─ QueueFull            too many requests wait; `retry_after_s` is when to retry
 └─ OutOfDeviceMemory    the device's memory does not suffice for one token of the request
DeadlineExceeded
 └─ NoSteps              no step ran that could be traced
Unavailable
 ├─ AdapterUnavailable   it did not become resident in time
 ├─ StoreUnavailable     the adapter store does not answer
 └─ EngineFailed         the engine has ended, and the server with it: try again, or another one
DataLoss
 └─ CorruptImage         pulled bytes fail their hash

UnsupportedModel, a FailedPrecondition, is raised at start only: the model directory holds something
that this decoder does not compute.
"""

from __future__ import annotations

from servicekit.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

TRY_LATER = "try again later (this server's log has the store's address)"
"""What callers are told of a store that does not answer: no address of it, which is for operators.
"""

PROMPT_SUBJECTS = frozenset({"chat", "messages"})
"""Subjects of errors whose messages could quote the prompt."""


class TemplateTimeout(InvalidArgument):
    reason = "TEMPLATE_TIMEOUT"


class AdapterNotFound(NotFound):
    reason = "ADAPTER_NOT_FOUND"


class DuplicateRequest(AlreadyExists):
    reason = "DUPLICATE_REQUEST_ID"


class AdapterUnusable(FailedPrecondition):
    reason = "ADAPTER_UNUSABLE"


class NoRoom(FailedPrecondition):
    reason = "NO_ROOM"


class ProfileRunning(FailedPrecondition):
    reason = "PROFILE_RUNNING"


class QueueFull(ResourceExhausted):
    reason = "QUEUE_FULL"


class OutOfDeviceMemory(ResourceExhausted):
    reason = "OUT_OF_DEVICE_MEMORY"


class NoSteps(DeadlineExceeded):
    reason = "NO_STEPS"


class AdapterUnavailable(Unavailable):
    reason = "ADAPTER_UNAVAILABLE"


class StoreUnavailable(Unavailable):
    reason = "STORE_UNAVAILABLE"


class CorruptImage(DataLoss):
    reason = "CORRUPT_IMAGE"


class EngineFailed(Unavailable):
    reason = "ENGINE_FAILED"

    @classmethod
    def because(cls, why: str) -> EngineFailed:
        return cls(
            f"the engine of this server has ended ({why}), and the server ends with it: try again "
            "later, or another server"
        )


class UnsupportedModel(FailedPrecondition):
    reason = "UNSUPPORTED_MODEL"
