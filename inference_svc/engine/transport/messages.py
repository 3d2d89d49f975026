"""The messages between front end and engine.

Plain data that pickles, so that the engine may run in a thread or in a process of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from inference_svc.core import AdapterVersion, FinishReason, Request
from inference_svc.errors import EngineFailed
from inference_svc.grammars.vocabulary import Vocabulary
from inference_svc.results.base import ResultPart
from servicekit.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the engine received the request: until it ran, of adapter wait, until its first
    token. `load` is the SpanContext of a load that it waited for, if that belongs to the trace of
    another request, which came first."""

    queued_s: float
    adapter_wait_s: float
    first_token_s: float
    load: Any = None


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request, waiting or running; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Move:
    """The name of a request's adapter has moved to this digest, which errors call `adapter`; ids of
    ended requests are ignored."""

    request_id: str
    digest: str
    adapter: str


class PauseMode(enum.Enum):
    """How running requests continue when generation pauses: they are held where they are, finished,
    or ended together with the waiting ones."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class Command(enum.Enum):
    LOAD = "load"
    UNLOAD = "unload"
    PIN = "pin"
    UNPIN = "unpin"
    LIST_RESIDENT = "list_resident"
    DESCRIBE = "describe"
    INSPECT = "inspect"
    INSPECT_ADAPTER = "inspect_adapter"
    PROFILE = "profile"
    STACKS = "stacks"
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's command; answered by one Reply of the same id.

    LOAD and PIN answer ResidentAdapter (LOAD once it is resident), UNLOAD the freed bytes,
    LIST_RESIDENT a tuple of ResidentAdapter, DESCRIBE an EngineStatus, INSPECT EngineDetails,
    INSPECT_ADAPTER AdapterDetails, PROFILE a StepTrace, STACKS the stacks of all threads by
    process, also while the engine hangs, PAUSE the number of requests that are held, SLEEP the
    freed bytes, WAKE the seconds that it took. `timeout_s` of PAUSE is when generation resumes by
    itself, 0 for never; `frees_weights` is for SLEEP. `limit` is the maximum number that
    LIST_RESIDENT returns, 0 for all: those on the device before the others, the last used of each
    tier first; of the rows of each list that INSPECT returns; and of the steps that PROFILE traces
    of this `rank`, within `timeout_s`. `trace` and `adapter` are as in a Request. A pin counts
    against the share of `account`; "" has none, and UNPIN of "" takes back the pins of all
    accounts.
    """

    call_id: int
    command: Command
    digest: str = ""
    pin: bool = False
    limit: int = 0
    timeout_s: float = 0.0
    trace: Any = None
    adapter: str = ""
    pause_mode: PauseMode = PauseMode.KEEP
    frees_weights: bool = False
    account: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    """Freed memory is there again, or could not be had: from the engine's own thread for that.
    `broken`: the device failed meanwhile."""

    error: ServiceError | None = None
    broken: Exception | None = None


@dataclass(frozen=True, slots=True)
class Abandon:
    """The caller no longer waits for the Reply to this call."""

    call_id: int


class StepTrace(NamedTuple):
    """A gzipped trace of `num_steps` steps, in a file that the receiver removes."""

    path: str
    num_steps: int

    def remove(self) -> None:
        """Does nothing the second time."""
        Path(self.path).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LayoutAccepted:
    """The store has accepted the layout, and the other ranks': pulls may begin."""

    layout_id: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank has ended: so does the engine."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Repointed:
    """A name that requests have used points to another digest now."""

    old_digest: str
    new_digest: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """No name that requests have used points to a digest any more; or, if not `is_superseded`, it
    is used again."""

    digest: str
    is_superseded: bool


@dataclass(frozen=True, slots=True)
class SetVocabulary:
    """The tokens that grammars are matched with; comes before the first request with a grammar."""

    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class MaskReady:
    """A mask is there that a sequence waits for, or will never be."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the loop; open requests and calls end with Draining."""


Message = (
    Submit
    | Cancel
    | Move
    | Call
    | Abandon
    | LayoutAccepted
    | Repointed
    | Superseded
    | Restored
    | RankFailed
    | SetVocabulary
    | MaskReady
    | Stop
)


@dataclass(frozen=True, slots=True)
class StoreMessage:
    """A message, in either direction, between the store's client in the engine's process and its
    counterpart in the front end's."""

    content: Any


class Output(NamedTuple):
    """One step's result for one request: at most one token, and `parts` of the results that the
    request asks for. The last one has `finish_reason` or `error`. `version` has made its token;
    None: the version that the request was submitted with.

    A tuple, since there is one for every token: quick to make and to pickle.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    parts: tuple[ResultPart, ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    version: AdapterVersion | None = None

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
    """All outputs of one step of the engine, in one message. `spans` are Spans of loads for traced
    requests."""

    outputs: tuple[Output, ...] = ()
    replies: tuple[Reply, ...] = ()
    failure: EngineFailed | None = None
    spans: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles outputs of one token, nearly all, as two columns: several times faster. They go
        first; a request has one output per step, so that no order is lost."""
        plain = [output for output in self.outputs if output[2:] == _DEFAULTS]
        others = tuple(output for output in self.outputs if output[2:] != _DEFAULTS)
        columns = tuple([o.request_id for o in plain]), tuple([o.token_ids for o in plain])
        return _rebuild, (*columns, others, self.replies, self.failure, self.spans)


_DEFAULTS = tuple(Output._field_defaults.values())[1:]


def _rebuild(
    request_ids: tuple[str, ...],
    token_ids: tuple[tuple[int, ...], ...],
    others: tuple[Output, ...],
    replies: tuple[Reply, ...],
    failure: EngineFailed | None,
    spans: tuple[Any, ...],
) -> StepOutputs:
    return StepOutputs((*map(Output, request_ids, token_ids), *others), replies, failure, spans)
