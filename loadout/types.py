"""What the client takes and returns: plain frozen data, without transport.

Sizes are bytes, durations seconds, times are aware UTC datetimes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypedDict

from loadout._rpc.arrays import PackedLogprobs as PackedLogprobs
from loadout._rpc.arrays import RoutedExperts as RoutedExperts
from loadout._rpc.server_info import ExpertLayers as ExpertLayers
from loadout._rpc.server_info import GenerationState as GenerationState
from loadout._rpc.server_info import MemoryUse as MemoryUse
from loadout._rpc.server_info import SamplingDefaults as SamplingDefaults
from loadout._rpc.server_info import ServerInfo as ServerInfo
from loadout._rpc.server_info import ServerLimits as ServerLimits

VersionPolicy = Literal["pin", "follow_keep", "follow_recompute"]
"""What a request does when its adapter's name moves to a newer version: end on its own, or go on
with the newer one, keys and values kept or computed again."""


class FinishReason(enum.Enum):
    """Why a generation ended. UNKNOWN here and below: the server is newer than this client."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class ImageState(enum.Enum):
    PENDING = "pending"
    COMPILING = "compiling"
    READY = "ready"
    INCOMPATIBLE = "incompatible"
    UNKNOWN = "unknown"


class BaseModelSource(enum.Enum):
    """What decided for which base model an adapter is recorded; the first that applies."""

    CALLER = "caller"
    CURRENT_VERSION = "current version"
    SERVED = "served"
    CONFIG = "config"
    DEFAULT = "default"
    ONLY_SERVED = "only served"
    UNKNOWN = "unknown"


class EventKind(enum.Enum):
    REGISTERED = "registered"
    UPDATED = "updated"
    DELETED = "deleted"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    BOOKMARK = "bookmark"
    UNKNOWN = "unknown"


class SegmentKind(enum.Enum):
    """What an adapter changes in a module."""

    A = "a"
    B = "b"
    BIAS = "bias"
    MAGNITUDE = "magnitude"
    ROW_IDS = "row_ids"
    ROWS = "rows"
    FULL = "full"
    UNKNOWN = "unknown"


class TargetKind(enum.Enum):
    """What an adapter changes a module of."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    EXPERTS = "experts"
    VECTOR = "vector"
    UNKNOWN = "unknown"


class AdapterTier(enum.Enum):
    DEVICE = "device"
    HOST = "host"
    UNKNOWN = "unknown"


# --- the adapter store --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerVerdict:
    """Whether the servers that have announced the same can serve an adapter, and why not.
    `max_rank` is the highest that they accept, 0 if they have not said."""

    announcement_id: str
    max_rank: int
    servable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LayoutState:
    """State of one adapter's image under one layout; `reason` says why it is INCOMPATIBLE.
    `servers` are those of the layout that are there now; `fits` says whether the adapter is known
    to fit it, also before the image is compiled. `unused_spaces` are parts of the model, such as
    "vision_tower", that the adapter changes and no request of these servers passes through."""

    layout_id: str
    state: ImageState
    reason: str
    image_bytes: int
    servers: tuple[ServerVerdict, ...] = ()
    fits: bool = False
    unused_spaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A base model as some servers compute it, and the images that the store has compiled for it.
    `other_base_models`, of equal shapes, are computed alike; `aliases` are of any of them.

    `max_ranks` are the highest ranks that its servers accept, 0 for any: one for all that have
    announced the same, none if no server is there now.
    """

    layout_id: str
    base_model: str
    other_base_models: tuple[str, ...]
    aliases: tuple[str, ...]
    max_ranks: tuple[int, ...]
    images: int
    image_bytes: int
    create_time: datetime | None
    last_use_time: datetime | None


@dataclass(frozen=True, slots=True)
class LayoutPage:
    """One page of the store's layouts; an empty `next_page_token` ends it."""

    layouts: tuple[Layout, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of an adapter as it was fetched; `sha256` in hex."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of an adapter. `name` is "tenant/name", `digest` the identity of its content.

    `created_by` is the token that recorded it, `signed_by` the key that it was verified with ("":
    it is not signed), `delete_time` since when it is deleted (None: it is not). `segment_kinds` are
    what it changes beside A and B, `added_tokens` how many it adds to the vocabulary, 0 until an
    image of it is planned; of aLoRA, it is active from the first of its `invocation_tokens` on,
    where all of them follow one another in the prompt for the last time. `tokenizer_digest` and
    `chat_template_digest` are of what it brings along about text, "" where that is its model's. The
    content of an `ephemeral` one is in the store's memory alone; at `expire_time` it is deleted by
    itself (None: never).
    """

    name: str
    version: int
    digest: str
    source_uri: str
    base_model: str
    rank: int
    targets: tuple[str, ...]
    source_bytes: int
    labels: Mapping[str, str]
    create_time: datetime | None
    update_time: datetime | None
    pinned: bool
    layout_states: tuple[LayoutState, ...]
    description: str = ""
    created_by: str = ""
    source_revision: str = ""
    config_base_model: str = ""
    files: tuple[SourceFile, ...] = ()
    signed_by: str = ""
    delete_time: datetime | None = None
    segment_kinds: tuple[SegmentKind, ...] = ()
    added_tokens: int = 0
    invocation_tokens: tuple[int, ...] = ()
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    ephemeral: bool = False
    expire_time: datetime | None = None

    @property
    def ref(self) -> str:
        """The reference of exactly this version."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature of a digest by the key `key_id` of the store's policy; see `loadout.signing`."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Registration:
    """A recorded adapter; pass `revision` to generate(min_revision=...) to be sure to use it.

    `deleted_versions` are the older ones that were deleted for it, by `keep` or by the store's
    policy. `base_model_reason` says in words how the adapter's base model was chosen: "" for a
    rollback. `ignored_config_keys` are unknown keys of its config that the store's operator lets
    pass.
    """

    adapter: Adapter
    revision: int
    deleted_versions: tuple[int, ...] = ()
    base_model_source: BaseModelSource = BaseModelSource.UNKNOWN
    base_model_reason: str = ""
    ignored_config_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrunedPage:
    """Versions that one call has deleted, at which revision, and whether there may be more."""

    deleted_versions: tuple[int, ...]
    revision: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class AdapterPage:
    """One page of the catalog as of `revision`; an empty `next_page_token` ends it."""

    adapters: tuple[Adapter, ...]
    next_page_token: str
    revision: int


@dataclass(frozen=True, slots=True)
class VersionPage:
    """One page of a name's versions, newest first. `current_version` 0: the name is deleted."""

    adapters: tuple[Adapter, ...]
    next_page_token: str
    current_version: int
    revision: int


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """One catalog change; `version` is what the name points to afterwards, 0 when it is gone."""

    revision: int
    kind: EventKind
    name: str
    version: int
    digest: str
    time: datetime | None


@dataclass(frozen=True, slots=True)
class TierStatus:
    used_bytes: int
    capacity_bytes: int
    images: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    version: str
    revision: int
    adapters: int
    layouts: int
    memory: TierStatus
    disk: TierStatus
    blob_bytes: int
    active_pulls: int


# --- the inference service ----------------------------------------------------------------------


class SamplingParams(TypedDict, total=False):
    """Keywords of `generate` and `complete`; what is left out takes the server's default."""

    max_tokens: int
    min_tokens: int
    temperature: float
    """0: greedy. The server's default is 1, or its model's: see ServerInfo.sampling_defaults."""
    top_k: int
    top_p: float
    min_p: float
    seed: int
    """The same seed gives the same tokens, whatever else runs; on GPUs up to rounding."""
    stop: str | list[str] | tuple[str, ...]
    """Strings that end the text; not part of it."""
    stop_token_ids: list[int] | tuple[int, ...]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int
    """Log probability of each token, and of this many most likely ones: at most 20, and 1,024 with
    `packed_logprobs`."""
    logprobs_mode: Literal["raw", "processed"]
    """What these are of: the model's own distribution, or what the token was drawn from. The
    server's default: see ServerInfo.sampling_defaults."""
    prompt_logprobs: int
    """Log probability of each token of the prompt, and of this many most likely ones, at most
    1,024, of the model's own distribution."""


class ChatMessage(TypedDict):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position; `top` has the most likely first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the queue, of adapter wait, and until the first token, by the server's clock."""

    queued_seconds: float
    adapter_wait_seconds: float
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class AdapterIdentity:
    """What a reference resolved to: "tenant/name@version" and the digest. `is_inactive`: the base
    model alone has answered, as the prompt does not have the adapter's invocation tokens. `scale`
    is what it is multiplied with as one of several."""

    name: str
    digest: str
    is_inactive: bool = False
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a generation. `finish_reason`, `usage` and `timings` come with the last one.

    `adapter` is None for the base model, and for several adapters, which are `adapters`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage | None
    adapter: AdapterIdentity | None
    timings: Timings | None
    adapters: tuple[AdapterIdentity, ...] = ()
    routed_experts: RoutedExperts | None = None
    """If requested. Those of a long prompt come in several chunks, of which only the last has
    tokens."""
    index: int = 0
    """Which of `n` answers this is of."""
    packed_logprobs: PackedLogprobs | None = None
    """In place of `logprobs`, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    """If requested; of several answers the first one has them, before its tokens."""
    kept_tokens: int = 0
    """The number of tokens whose keys and values are of earlier versions."""
    echoed_tokens: int = 0
    """The number of `token_ids`, the first ones, that are the prompt's: made by no version."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation; `adapter` and `adapters` as of Chunk."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage | None
    adapter: AdapterIdentity | None
    timings: Timings | None
    adapters: tuple[AdapterIdentity, ...] = ()
    routed_experts: RoutedExperts | None = None
    """What all its tokens but the last have chosen, if requested."""
    packed_logprobs: PackedLogprobs | None = None
    """In place of `logprobs`, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    """That of all tokens of the prompt but the first, if requested; of several answers the first
    one has it."""
    versions: tuple[tuple[AdapterIdentity, int], ...] = ()
    """The versions of its adapter that have made its tokens, one after the other, and how many;
    not those of an echoed prompt."""


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """An adapter in the inference service's memory; `names` are those known to point to it.

    `superseded`: no name points to it any more. `names` then has its last one, with the version.
    """

    digest: str
    names: tuple[str, ...]
    tier: AdapterTier
    num_bytes: int
    rank: int
    pinned: bool
    running_requests: int
    last_used_time: datetime | None
    load_seconds: float
    superseded: bool = False

    @property
    def label(self) -> str:
        """Its names, or without any its digest, and whether it is old: "team/french@3 (old)"."""
        return (", ".join(self.names) or self.digest) + " (old)" * self.superseded


@dataclass(frozen=True, slots=True)
class ResidentSegment:
    """A matrix or vector of an adapter: `num_bytes` from byte `offset` of its memory on. Equal ones
    may lie there once."""

    kind: SegmentKind
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class ResidentTarget:
    """What an adapter has of one module; `layer` is None outside of layers."""

    name: str
    layer: int | None
    kind: TargetKind
    rank: int
    segments: tuple[ResidentSegment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class ResidentExtent:
    """Bytes of an adapter that lie side by side, from byte `offset` of its memory on."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OperationGroup:
    """Modules that are computed together, and what a decode step launches for them. `targets` are
    the adapter's; without any the step launches the group for whatever adapters there are."""

    name: str
    targets: tuple[str, ...]
    launches: int


@dataclass(frozen=True, slots=True)
class InspectedAdapter:
    """The parts of a resident adapter, in the memory that `adapter` names.

    `slot` is its row there, `extents` where it lies, in its own order. `groups` are what a decode
    step launches for adapters if it is the only one, `launches` their sum: kernels on a GPU,
    operations on a CPU, computed by `kernels`.
    """

    adapter: ResidentAdapter
    slot: int
    extents: tuple[ResidentExtent, ...]
    targets: tuple[ResidentTarget, ...]
    groups: tuple[OperationGroup, ...]
    launches: int
    kernels: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One of several replicas, as this client knows it. `is_healthy` if it takes calls;
    `num_requests` run or wait there, `max_sequences` may run at once (0: it has published none)."""

    address: str
    is_healthy: bool
    num_requests: int
    max_sequences: int


# --- for operators of both ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DebugPart:
    """A file of debug info, such as "config.json"; `error` says why there is no content."""

    name: str
    content: bytes
    error: str


@dataclass(frozen=True, slots=True)
class TracePiece:
    """A piece of a gzipped trace in Chrome's JSON. `num_steps` comes with the first, else 0."""

    data: bytes
    num_steps: int
