"""The messages between front end and engine.

Plain data that pickles, so that the engine may run in a thread or in a process of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from inference_svc.core import FinishReason, Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the engine received the request: until it ran, of adapter wait, until its
    first token. `load` is the SpanContext of a load that it waited for, if that is in the trace of
    another request, which had asked first."""

    queued_s: float
    adapter_wait_s: float
    first_token_s: float
    load: Any = None


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request wherever it is; unknown ids are ignored."""

    request_id: str


class Command(enum.Enum):
    LOAD = "load"
    UNLOAD = "unload"
    PIN = "pin"
    UNPIN = "unpin"
    LIST_RESIDENT = "list_resident"
    DESCRIBE = "describe"
    INSPECT = "inspect"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's command; answered by one Reply of the same id.

    LOAD and PIN answer ResidentAdapter (LOAD once it is resident), UNLOAD the freed bytes,
    LIST_RESIDENT a tuple of ResidentAdapter, DESCRIBE an EngineStatus, INSPECT EngineDetails,
    PROFILE a StepTrace. `limit` is how many LIST_RESIDENT answers at most, 0 for all: of each tier
    the last used first, those on the device before the others; how many rows of anything INSPECT
    tells; and how many steps PROFILE traces, within `timeout_s`. `trace` as of a Request.
    """

    call_id: int
    command: Command
    digest: str = ""
    pin: bool = False
    limit: int = 0
    timeout_s: float = 0.0
    trace: Any = None


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody waits for this call's Reply any more."""

    call_id: int


class StepTrace(NamedTuple):
    """A gzipped trace of `num_steps` steps, in a file that is the receiver's to remove."""

    path: str
    num_steps: int

    def remove(self) -> None:
        """Does nothing the second time."""
        Path(self.path).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LayoutAccepted:
    """The store knows our layout: pulls may begin."""

    layout_id: str


@dataclass(frozen=True, slots=True)
class Repointed:
    """A name that requests have used now points to another digest."""

    old_digest: str
    new_digest: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the loop; whatever still runs is answered with Draining."""


Message = Submit | Cancel | Call | Abandon | LayoutAccepted | Repointed | Stop


@dataclass(frozen=True, slots=True)
class StoreMessage:
    """Either way, between the store's client beside an engine in a process of its own and its
    counterpart beside the front."""

    content: Any


class Output(NamedTuple):
    """What one request got from one step. The last one has `finish_reason` or `error`.

    A tuple, as there is one for every token: quick to make and to pickle.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Reply:
    call_id: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Everything one turn of the engine has to say, in one message. `spans` are Spans, of loads for
    requests that are traced."""

    outputs: tuple[Output, ...] = ()
    replies: tuple[Reply, ...] = ()
    failure: Exception | None = None
    spans: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Nearly all outputs are one token each: two columns of them pickle several times faster.
        They go in front; a request has one output per turn, so that no order is lost."""
        plain = [output for output in self.outputs if output[2:] == _NOTHING_ELSE]
        others = tuple(output for output in self.outputs if output[2:] != _NOTHING_ELSE)
        columns = tuple([o.request_id for o in plain]), tuple([o.token_ids for o in plain])
        return _rebuild, (*columns, others, self.replies, self.failure, self.spans)


_NOTHING_ELSE = tuple(Output._field_defaults.values())[1:]


def _rebuild(
    request_ids: tuple[str, ...],
    token_ids: tuple[tuple[int, ...], ...],
    others: tuple[Output, ...],
    replies: tuple[Reply, ...],
    failure: Exception | None,
    spans: tuple[Any, ...],
) -> StepOutputs:
    return StepOutputs((*map(Output, request_ids, token_ids), *others), replies, failure, spans)
