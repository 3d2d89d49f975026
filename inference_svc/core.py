"""Roles, requests, sequences and batches: plain data without tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from servicekit.auth import principal
from servicekit.auth.principal import Roles


class Action(enum.Enum):
    """What a call does; every RPC is one of these."""

    GENERATE = "generate"
    OPERATE = "load, unload, pin or list adapters"
    INSPECT = "debug or profile the server"
    INFO = "read the server's facts"


ROLES = Roles(
    {
        "caller": frozenset({Action.GENERATE, Action.INFO}),
        "operator": frozenset({Action.OPERATE, Action.INSPECT, Action.INFO}),
    },
    foreign=frozenset({"reader", "publisher", "server", "admin"}),  # the adapter store's
)

Principal: TypeAlias = principal.Principal[Action]

ANYONE = ROLES.anyone
"""Every caller, where there is no policy."""

BASE_SLOT = -1
"""The slot of rows that use no adapter."""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The choice of tokens, as `api.generate_call.checked_sampling` validates it.

    `stop` strings are matched on text by the frontend; the engine never handles text.
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
    """One generation.

    `digest` is "" for the base model. `cache_seed` separates prefix caches (tenants and salt).
    `tenant` is the caller's: tenants share the machine in equal parts. `trace` is the SpanContext
    that loads for it belong to, None if it is not traced.
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
    in `page_ids`. Its adapter's slot is held while it runs. `is_aged` if it was aged when it
    started; `is_charged` once its tenant was charged for it. `load_trace`: see Timings.load.
    `token_counts` belong to the sampler.
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
    """One step's work: rows of one slot are adjacent; `residency` takes effect before them."""

    rows: tuple[BatchRow, ...]
    residency: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of the chosen token, and the most likely (token id, log probability)s."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """The sampler's choice for one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None
