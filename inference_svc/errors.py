"""The inference service's own errors, below the general kinds whose status code they have.

InvalidArgument
 ├─ TemplateTimeout      the chat template takes too long for these messages
 └─ GrammarRefused       the answer's form is invalid, or cannot be enforced
NotFound
 ├─ AdapterNotFound      no adapter has this reference
 └─ ImageNotFound        no uploaded image has this hash: upload it again
AlreadyExists
 └─ DuplicateRequest     a running request has this request_id
FailedPrecondition
 ├─ AdapterUnusable      the adapter exists, but this model cannot serve it
 │   ├─ TokenizerChanged     the adapter's tokenizer changes more of the model's than allowed
 │   └─ ChatTemplateInvalid  the adapter's chat template is invalid
 ├─ NotFinite            the model's values overflow for this request
 ├─ NoRoom               the adapter or its pin needs more space than there is
 ├─ ProfileRunning       steps are being traced for another caller
 ├─ ImageFetchFailed     the host of an image's URL does not send it; another try may succeed
 ├─ Interrupted          generation was resumed, or the server woken, before it paused or slept
 └─ CannotWake           the server cannot get back the memory or weights that it freed
ResourceExhausted
 ├─ QueueFull            too many requests wait; RetryInfo has the time of a retry
 └─ OutOfDeviceMemory    the device has too little memory for one token of the request
DeadlineExceeded
 └─ NoSteps              no step ran in time
Unavailable
 ├─ AdapterUnavailable   the adapter did not become resident in time
 ├─ StoreUnavailable     the adapter store does not answer
 ├─ Asleep               the server is asleep; retry at another replica
 └─ EngineFailed         the engine failed and the server ends; retry at another replica
DataLoss
 └─ CorruptImage         the pulled bytes fail their hash

UnsupportedModel, a FailedPrecondition, is raised at start only: the model directory holds something
that this decoder does not compute. So is DeviceFull: others have taken the device's memory.
"""

from __future__ import annotations

import enum
from typing import Any

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
"""The text that callers get for a logged failure of the store: no address of it, which is for
operators."""
ENGINE_ADVICE = ": try again later, or another server"

PROMPT_SUBJECTS = frozenset({"chat", "messages", "chat.messages"})
"""Subjects of errors whose messages could quote the prompt, and so could messages about a part of
them."""


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


class GrammarRefused(InvalidArgument):
    reason = "GRAMMAR_REFUSED"


class AdapterNotFound(NotFound):
    reason = "ADAPTER_NOT_FOUND"


class ImageNotFound(NotFound):
    reason = "IMAGE_NOT_FOUND"


class DuplicateRequest(AlreadyExists):
    reason = "DUPLICATE_REQUEST_ID"


class AdapterUnusable(FailedPrecondition):
    reason = "ADAPTER_UNUSABLE"


class TokenizerChanged(AdapterUnusable):
    reason = "TOKENIZER_CHANGED"


class ChatTemplateInvalid(AdapterUnusable):
    reason = "CHAT_TEMPLATE_INVALID"


class NotFinite(FailedPrecondition):
    reason = "VALUES_NOT_FINITE"


class NoRoom(FailedPrecondition):
    reason = "NO_ROOM"


class ProfileRunning(FailedPrecondition):
    reason = "PROFILE_RUNNING"


class ImageFetchFailed(FailedPrecondition):
    reason = "IMAGE_FETCH_FAILED"


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


class DeviceFault(enum.Enum):
    """How a device that computes fails, or its driver; metrics name it so. `MEMORY`: others have
    taken it. `HARDWARE`: its memory or its links are damaged. `LOST`: it does not answer any more.
    `DRIVER`: the driver cannot be used. `KERNEL`: a computation went wrong. `HUNG`: one does not
    end. `BUSY`: another program has it alone."""

    MEMORY = "memory"
    HARDWARE = "hardware"
    LOST = "lost"
    DRIVER = "driver"
    KERNEL = "kernel"
    HUNG = "hung"
    BUSY = "busy"


class EngineFailed(Unavailable):
    """`fault` is the device's, if that is why; `remedy` then has the operators' remedy."""

    reason = "ENGINE_FAILED"
    fault: DeviceFault | None = None
    remedy = ""

    @classmethod
    def because(cls, why: str, fault: DeviceFault | None = None, remedy: str = "") -> EngineFailed:
        return cls(
            f"the engine of this server has ended ({why}), and the server ends with it"
            f"{ENGINE_ADVICE}"
        ).with_fault(fault, remedy)

    def with_fault(self, fault: DeviceFault | None, remedy: str) -> EngineFailed:
        """Returns itself, with these if there is a fault."""
        if fault is not None:
            self.fault, self.remedy = fault, remedy
        return self

    @property
    def for_operator(self) -> str:
        """The message with the operators' remedy in place of the callers'."""
        return self.message.replace(ENGINE_ADVICE, f"; {self.remedy or 'its log has more'}")

    def __reduce__(self) -> tuple[Any, ...]:
        state = {} if self.fault is None else {"fault": self.fault, "remedy": self.remedy}
        return (*super().__reduce__(), state)


class DeviceFull(ValueError):
    """A start would have had enough of the device's memory without other programs."""


class UnsupportedModel(FailedPrecondition):
    reason = "UNSUPPORTED_MODEL"


def notes_of(error: ServiceError) -> str:
    """Returns the details that an error has for this server's log, such as addresses."""
    return " ".join(getattr(error, "__notes__", ()))
