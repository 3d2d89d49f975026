"""The inference service's words: requests, sequences, batches, and the engine's messages.

Everything here is plain data without tensors. Messages pickle, so that the engine may live in a
thread or in a process of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

BASE_SLOT = -1
"""The slot of rows that use no adapter."""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; validated where it is born, in `convert`.

    `stop` strings are matched on text by the frontend; the engine never sees text.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked to do.

    `digest` is "" for the base model. `cache_seed` separates prefix caches (tenants and salt).
    `tenant` is the caller's: tenants share the machine in equal parts. `trace` is a SpanContext,
    of what is done for it; None: that is not traced.
    Times are `time.monotonic()` seconds, which processes of one machine share.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    digest: str = ""
    cache_seed: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    tenant: str = ""
    trace: Any = None


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in progress. Only the scheduler and settle change it.

    `token_ids` is prompt then output; the keys and values of its first `num_computed` tokens lie
    in `page_ids`. Its adapter's slot is held while it runs. `is_aged` once it started after it had
    waited for long; `is_charged` once its tenant's account was. `load_trace`: see Timings.load.
    `token_counts` are the sampler's.
    """

    request: Request
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    page_ids: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    slot: int = BASE_SLOT
    state: SequenceState = SequenceState.WAITING
    adapter_wanted_s: float | None = None
    adapter_ready_s: float | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0
    is_aged: bool = False
    is_charged: bool = False
    load_trace: Any = None
    token_counts: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert self.request.prompt_token_ids, "a sequence has at least one token"
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed


class BatchRow(NamedTuple):
    """One sequence's share of a step: tokens [start, start + num_tokens) of `sequence.token_ids`.

    `samples` is true when this step computes the last known token, so that a next one follows.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def slot(self) -> int:
        return self.sequence.slot

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and self.samples


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: rows of one slot are neighbours; `residency` takes effect before them."""

    rows: tuple[BatchRow, ...]
    residency: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of the chosen token, and the most likely (token id, log probability)s."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """What the sampler chose for one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None


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
    EXAMINE = "examine"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's command; answered by one Reply of the same id.

    LOAD and PIN answer ResidentAdapter (LOAD once it is resident), UNLOAD the freed bytes,
    LIST_RESIDENT a tuple of ResidentAdapter, DESCRIBE an EngineStatus, EXAMINE EngineDetails,
    PROFILE a StepTrace. `limit` is how many LIST_RESIDENT answers at most, 0 for all: of each tier
    the last used first, those on the device before the others; how many rows of anything EXAMINE
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
class StoreNews:
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
