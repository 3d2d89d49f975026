"""Roles, requests, sequences and batches, and the engine's settings: plain data without tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from inference_svc.grammars.budget import Thinking, ThoughtBudget
from inference_svc.grammars.grammar import Grammar
from inference_svc.pictures.prompt import NO_WORK, PictureKey, PictureWork, PromptPicture
from inference_svc.pictures.uploads import room_for_uploads
from inference_svc.results.base import NOTHING, Kind, PlacedPart, ResultPart, Scope, Wanted
from inference_svc.results.logprobs import LogprobsMode
from servicekit.auth import principal
from servicekit.auth.principal import Roles


class Action(enum.Enum):
    """The action of a call; every RPC is one of these."""

    GENERATE = "generate"
    OPERATE = "load, unload, pin or list adapters, pause or sleep"
    LOAD = "load adapters ahead of their first request"
    INSPECT = "debug or profile the server"
    INFO = "read the server's facts"


ROLES = Roles(
    {
        "caller": frozenset({Action.GENERATE, Action.INFO}),
        "operator": frozenset({Action.OPERATE, Action.LOAD, Action.INSPECT, Action.INFO}),
        # The store's: who may publish a version may have it loaded before it is used.
        "publisher": frozenset({Action.LOAD}),
    },
    foreign=frozenset({"reader", "server", "admin"}),  # the adapter store's
)

Principal: TypeAlias = principal.Principal[Action]

ANYONE = ROLES.anyone
"""Every caller, where there is no policy."""

BASE_SLOT = -1
"""The slot of rows that use no adapter."""

EMPTY_STATE = 0
"""The slot of the recurrent state before a sequence's first token."""

MAX_PARTS = 8
"""The adapters of one sum, at most; also `kernels.lora.table.MAX_PARTS`."""

Digest: TypeAlias = str
"""The identity of an adapter's content."""


class Part(NamedTuple):
    """An adapter of a sum, and its factor."""

    digest: Digest
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of adapters that one request runs with, in the order given."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        assert 0 < len(self.parts) <= MAX_PARTS

    def __str__(self) -> str:
        """Returns its form in logs, page keys and errors: no two sums have the same."""
        return "sum:" + _PLUS.join(f"{digest}*{scale.hex()}" for digest, scale in self.parts)


AdapterKey: TypeAlias = Digest | Sum
"""What a request runs with: one adapter, a sum of several, or "", the base model alone."""

_PLUS = " + "


def digests_of(key: AdapterKey) -> tuple[Digest, ...]:
    """Returns the adapters that must be resident for this key; the base model has none."""
    if isinstance(key, Sum):
        return tuple([part.digest for part in key.parts])
    return (key,) if key else ()


def sum_label(names: Iterable[str]) -> str:
    """Returns the name of a sum in errors and logs, from the names of its parts."""
    return _PLUS.join(names)


class VersionPolicy(enum.Enum):
    """How a request continues when its adapter's name moves to a newer version: end on its own, or
    move at a step's border. The state of its tokens is then kept, once it has generated one, or
    computed again."""

    PIN = "pin"
    FOLLOW_KEEP = "follow_keep"
    FOLLOW_RECOMPUTE = "follow_recompute"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for requests. `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    logprobs_mode: LogprobsMode = LogprobsMode.RAW

    def choice(self) -> dict[str, Any]:
        """Returns the defaults that are fields of SamplingParams."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


NO_DEFAULTS = SamplingDefaults()
"""The defaults of a model that says nothing."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The choice of tokens, as `api.generate_call.checked_sampling` validates it.

    `max_tokens` 0: nothing is generated. `stop` strings are matched on text by the frontend; the
    engine never handles text.
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

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One generation or, as its results say, one prompt that is pooled.

    `names` are the names in errors of the adapters of `key`, in their order. `activation` is the
    index of the first token that the adapter changes: the tokens before it are the base model's.
    `cache_seed` separates prefix caches (tenants and salt); so do some of the results that are
    `wanted`. Of requests of one `group`, which have one prompt, the first one computes it, and the
    others wait for that; "" is none. `vocab_size` is how many tokens it may name: the model's, and
    its adapter's; 0: all that there are. `grammar` is the form of its output, and `budget` bounds
    its thoughts. `pictures` are the prompt's, in order. `second_start` is the index of the first
    token of a pair's second text, where token types become 1; 0: all are 0. `tenant` is the
    caller's: tenants share the machine in equal parts. `trace` is the SpanContext that loads for it
    belong to, or None. Times are `time.monotonic()` seconds.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    key: AdapterKey = ""
    cache_seed: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    tenant: str = ""
    trace: Any = None
    names: tuple[str, ...] = ()
    activation: int = 0
    wanted: Wanted = NOTHING
    version_policy: VersionPolicy = VersionPolicy.PIN
    group: str = ""
    vocab_size: int = 0
    grammar: Grammar | None = None
    budget: ThoughtBudget | None = None
    pictures: tuple[PromptPicture, ...] = ()
    second_start: int = 0

    @property
    def kind(self) -> Kind:
        return self.wanted.kind

    @property
    def has_inactive_adapter(self) -> bool:
        """Whether the base model answers, though an adapter was requested: the prompt lacks its
        invocation tokens."""
        return bool(self.names) and not self.key

    @property
    def adapter(self) -> str:
        """The name of its adapter, or sum, in errors and logs."""
        return sum_label(self.names)

    def name_of(self, digest: Digest) -> str:
        """Returns the name of its adapter, or part of its sum, with this digest."""
        return dict(zip(digests_of(self.key), self.names, strict=False)).get(digest, "")


class AdapterVersion(NamedTuple):
    """A version of its adapter that a request has moved to. `num_kept`: see Sequence."""

    label: str
    digest: str
    num_kept: int = 0


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in progress. Only the scheduler and settle change it.

    `request` is replaced when it moves to a newer `version` of its adapter, None before.
    `num_kept`: the state of so many tokens is of earlier versions: their keys and values, and the
    recurrent state that later tokens are added to. `has_sampled`: a token was sampled from the
    computed state, which shows whose it is.

    `token_ids` is prompt then output, of which the first `num_computed` are computed: their keys
    and values lie in `page_ids`, a list that only grows while it runs and is replaced when it is
    preempted or ends, and the recurrent state behind them in the slot `state_read`; a step leaves
    its own in `state_written`, and in the slots of `state_borders` the states of tokens on the way,
    as (how many tokens, slot). `room` is the number of tokens that its pages hold. `num_reserved`
    tokens can be computed before `States.allocate` is due, and `settles_at` before its `settle`.

    Its adapter's slot is held while it runs. `is_aged` if it was so when it started; `is_charged`
    once its tenant was charged for it, `charged_per_token` to generate. `load_trace`: Timings.load.
    `num_returned` counts the positions whose parts of each kind were returned, also across
    preemptions, and `num_scored` the tokens of the prompt whose results need not be computed any
    more. Of a prompt that is pooled the results of tokens from `next_pooled` up to `end_pooled` are
    left to be returned; of others these are 0. `token_counts` belong to the sampler, as does
    `is_sorted`: the vocabulary had to be sorted to choose its last token. `masked` is its
    `grammars.lanes.lane.Row` while it runs, None without a grammar, and `thinking` counts its
    thoughts. `held_pictures` are the pictures whose embeddings are kept for it, by index. It has
    come to a picture that is not there yet if it `awaits_picture`; a step computes its next
    `num_at_once` tokens, or none of them.
    `num_output_at_start` is the number of its output tokens when it last started, and `may_move_at`
    the number that it needs before it is computed anew for a newer version.
    """

    request: Request
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    version: AdapterVersion | None = None
    num_kept: int = 0
    has_sampled: bool = False
    num_computed: int = 0
    num_cached: int = 0
    page_ids: list[int] = field(default_factory=list)
    prefix_keys: list[bytes] = field(default_factory=list)
    state_read: int = EMPTY_STATE
    state_written: int = EMPTY_STATE
    state_borders: list[tuple[int, int]] = field(default_factory=list)
    room: int = 0
    num_reserved: int = 0
    settles_at: int = 0
    slot: int = BASE_SLOT
    state: SequenceState = SequenceState.WAITING
    adapter_wanted_s: float | None = None
    adapter_ready_s: float | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0
    num_returned: dict[type[ResultPart], int] = field(default_factory=dict)
    num_scored: int = field(init=False)
    next_pooled: int = 0
    end_pooled: int = 0
    is_aged: bool = False
    is_charged: bool = False
    charged_per_token: float = 0.0
    load_trace: Any = None
    token_counts: Any = field(default=None, repr=False)
    is_sorted: bool = False
    masked: Any = field(default=None, repr=False)
    thinking: Thinking | None = field(init=False, repr=False)
    num_output_at_start: int = 0
    may_move_at: int = 0
    held_pictures: dict[int, PictureKey] = field(default_factory=dict)
    awaits_picture: bool = False
    num_at_once: int = 0

    def __post_init__(self) -> None:
        assert self.request.prompt_token_ids, "a sequence has at least one token"
        self.token_ids = list(self.request.prompt_token_ids)
        self.thinking = Thinking(self.request.budget) if self.request.budget else None
        self.num_prompt = len(self.token_ids)
        is_scored = self.request.wanted.has_scope(Scope.PROMPT)
        self.num_scored = 1 if is_scored else self.num_prompt
        if self.request.wanted.kind is not Kind.GENERATE:
            self.next_pooled, self.end_pooled = self.request.wanted.pooled(self.num_prompt)

    def note_returned(self, part: PlacedPart) -> None:
        """Notes that a part is on its way to the caller."""
        self.num_returned[type(part)] = part.end
        if part.scope is Scope.PROMPT:
            self.num_scored = part.end
        elif part.scope is Scope.POOLED:
            self.next_pooled = part.end

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_computed_anew(self) -> bool:
        """Whether it has moved to a newer version, and is to be computed for that first."""
        return self.version is not None and not self.has_sampled and self.num_output > 0


class BatchRow(NamedTuple):
    """One sequence's share of a step: tokens [start, start + num_tokens) of `sequence.token_ids`.

    `samples` is true when this step computes the last known token, so that a next one follows: of a
    prompt that is pooled none does.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def slot(self) -> int:
        return self.sequence.slot


class BatchColumns(NamedTuple):
    """The rows of a batch, field by field."""

    sequences: tuple[Sequence, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    is_decode: bool
    """Whether each row is one token that samples."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: rows of one slot are adjacent; `residency` takes effect before them, and
    then `pictures`. Unless it `pools`, no row is of a prompt that is pooled."""

    rows: tuple[BatchRow, ...]
    residency: tuple[Any, ...] = ()
    pools: bool = False
    pictures: PictureWork = NO_WORK

    def columns(self) -> BatchColumns:
        """Returns the rows, of which there is at least one, field by field: quicker to work on."""
        sequences, starts, counts, samples = zip(*self.rows, strict=True)
        is_decode = all(samples) and sum(counts) == len(counts)
        return BatchColumns(sequences, starts, counts, is_decode)


class SampledToken(NamedTuple):
    """The sampler's choice for one row, and the results that come with it."""

    token_id: int
    parts: tuple[ResultPart, ...] = ()


def padding_pages(device: str) -> int:
    """Returns the number of pages that no sequence may own: on a device the rows that pad a step
    write to one."""
    return int(device != "cpu")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines whose ranks compute together: `count` of them, of which this is the one with
    this `index`. Rank 0 listens at the `rendezvous`, HOST:PORT, and waits for others for
    `timeout_s`; all of them know the `token`."""

    count: int
    index: int
    rendezvous: str
    timeout_s: float
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`dtype` and `device` are resolved ("float32", "cpu"); sizes in bytes. `quantize` is the type
    in which plain weights of layers are held ("int4"); "none": in `dtype`. `adapter_dtype` is the
    type of adapters' A and B, and `kv_dtype` of keys and values, "fp8"; "auto": `dtype`.

    `host_bytes` 0: no host tier, pulls write straight into the arena (CPU only). `lora_targets`:
    the modules that adapters may change, by last components of targets' names; none: all.
    `max_added_tokens`: how many tokens behind the vocabulary an adapter may have; with
    `classifiers` it may have a classifier's head of its own. `record_steps`:
    steps are recorded and replayed where the device can. `num_threads` 0: one per core that this
    process may use, of which ranks have equal parts. `memory_limit_bytes` 0: on CPU the machine's
    free memory, else the device's memory; `host_limit_bytes`, of the host where the device has
    memory of its own, 0: its free memory. `frontend_bytes` is the memory of the process that the
    engine serves from a process of its own, `tokenizer_bytes` the memory that it will take in
    addition when its tokenizer is loaded. A model with recurrent layers stores a state every
    `state_pages` pages, at most `num_stored_states` of them, in addition to two per running
    sequence. Layers are in `pipeline_parallel` stages, of `tensor_parallel` processes each, which
    have a part of these layers, and the memory of pages and arena each; they are of one machine or
    of several `nodes`. Experts of mixtures are divided into `expert_parallel` parts.
    `fully_sharded_loras`: nothing of an adapter's projections is whole on
    each. A prompt may have `max_prompt_images`; 0: it has text alone, and no vision tower is
    loaded. Embeddings of pictures take `prompt_image_bytes`.
    """

    model_dir: Path
    base_model: str
    dtype: str = "float32"
    quantize: str = "none"
    adapter_dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int = 2048
    max_sequences: int = 64
    max_batch_tokens: int = 1024
    max_prefill_chunk: int = 1024
    max_queue: int = 1024
    max_tenant_queue: int = 1024
    page_size: int = 16
    kv_bytes: int = 256 << 20
    state_pages: int = 32
    num_stored_states: int = 64
    arena_bytes: int = 256 << 20
    host_bytes: int = 0
    memory_limit_bytes: int = 0
    host_limit_bytes: int = 0
    frontend_bytes: int = 0
    tokenizer_bytes: int = 0
    max_loras: int = 256
    max_lora_rank: int = 64
    lora_targets: tuple[str, ...] = ()
    max_added_tokens: int = 0
    classifiers: bool = False
    adapter_wait_s: float = 10.0
    fair_quantum: int = 1024
    fair_ageing_s: float = 2.0
    tenant_share: float = 1.0
    pull_workers: int = 4
    prefetch: bool = True
    prefix_cache: bool = True
    num_threads: int = 0
    native_kernels: bool = True
    record_steps: bool = True
    tensor_parallel: int = 1
    fully_sharded_loras: bool = False
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: Nodes | None = None
    max_prompt_images: int = 0
    prompt_image_bytes: int = 0

    @property
    def upload_bytes(self) -> int:
        """The memory that uploaded pictures take in the process that the engine serves, which is on
        the first machine."""
        is_served = bool(self.max_prompt_images) and 0 in self.local_ranks
        return room_for_uploads(self.prompt_image_bytes) if is_served else 0

    @property
    def num_ranks(self) -> int:
        """The processes of all stages; those of a stage are neighbours."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine."""
        count, index = (1, 0) if self.nodes is None else (self.nodes.count, self.nodes.index)
        num_ranks = self.num_ranks // count
        return range(index * num_ranks, (index + 1) * num_ranks)

    @property
    def num_computing(self) -> int:
        """How many ranks of this machine compute at the same time: those of one stage."""
        return min(self.tensor_parallel, len(self.local_ranks))
