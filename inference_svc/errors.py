"""The inference service's own errors, below the general kinds whose status code they have.

InvalidArgument
 └─ TemplateTimeout      the chat template takes too long for these messages
NotFound
 └─ AdapterNotFound      the reference resolves to nothing
AlreadyExists
 └─ DuplicateRequest     a running request has this id
FailedPrecondition
 ├─ AdapterUnusable      the adapter exists, and this model cannot serve it
 │   ├─ TokenizerChanged     its tokenizer changes more of the model's than it may
 │   └─ ChatTemplateInvalid  its chat template is none
 ├─ NoRoom               what is requested would pin or occupy more than there is
 ├─ ProfileRunning       steps are being traced for another caller
 ├─ Interrupted          generation was resumed, or the server woken, before it paused or slept
 └─ CannotWake           what the server has freed cannot be had again
ResourceExhausted
 ├─ QueueFull            too many requests wait; `retry_after_s` is when to retry
 └─ OutOfDeviceMemory    the device's memory does not suffice for one token of the request
DeadlineExceeded
 └─ NoSteps              no step ran that could be traced
Unavailable
 ├─ AdapterUnavailable   it did not become resident in time
 ├─ StoreUnavailable     the adapter store does not answer
 ├─ Asleep               the server's memory is freed until it is woken: try another server
 └─ EngineFailed         the engine has ended, and the server with it: try another server
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
    ServiceError,
    Unavailable,
)

TRY_LATER = "try again later"
TRY_LATER_SEE_LOG = f"{TRY_LATER} (this server's log has the store's address)"
"""What callers are told of a failure of the store that was logged: no address of it, which is for
operators."""
ENGINE_ADVICE = ": try again later, or another server"

PROMPT_SUBJECTS = frozenset({"chat", "messages"})
"""Subjects of errors whose messages could quote the prompt."""


def with_name(error: ServiceError, digest: str, name: str) -> ServiceError:
    """Returns an error about an adapter's content for a caller who asked for it by `name`; "": by
    its digest."""
    message = error.message.replace(digest, name or digest)
    named = type(error)(
        message,
        subject=error.subject,
        reason=error.reason,
        retry_after_s=error.retry_after_s,
    )
    if notes := notes_of(error):
        named.add_note(notes)
    return named


class TemplateTimeout(InvalidArgument):
    reason = "TEMPLATE_TIMEOUT"


class AdapterNotFound(NotFound):
    reason = "ADAPTER_NOT_FOUND"


class DuplicateRequest(AlreadyExists):
    reason = "DUPLICATE_REQUEST_ID"


class AdapterUnusable(FailedPrecondition):
    reason = "ADAPTER_UNUSABLE"


class TokenizerChanged(AdapterUnusable):
    reason = "TOKENIZER_CHANGED"


class ChatTemplateInvalid(AdapterUnusable):
    reason = "CHAT_TEMPLATE_INVALID"


class NoRoom(FailedPrecondition):
    reason = "NO_ROOM"


class ProfileRunning(FailedPrecondition):
    reason = "PROFILE_RUNNING"


class Interrupted(FailedPrecondition):
    reason = "INTERRUPTED"


class CannotWake(FailedPrecondition):
    reason = "CANNOT_WAKE"


class Asleep(Unavailable):
    reason = "ASLEEP"


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
            f"the engine of this server has ended ({why}), and the server ends with it"
            f"{ENGINE_ADVICE}"
        )

    @property
    def for_operator(self) -> str:
        """The message with what operators can do in place of what callers can."""
        return self.message.replace(ENGINE_ADVICE, "; its log says more")


class UnsupportedModel(FailedPrecondition):
    reason = "UNSUPPORTED_MODEL"


def notes_of(error: ServiceError) -> str:
    """Returns what was added to an error for this server's log, such as addresses."""
    return " ".join(getattr(error, "__notes__", ()))
