"""Types that the client takes and returns: plain frozen data, without transport.

Sizes are bytes, durations seconds, times are aware UTC datetimes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypedDict

from contract.images.segment_kinds import SegmentKind as SegmentKind
from contract.images.targets import TargetKind as TargetKind
from loadout._rpc.arrays import PackedLogprobs as PackedLogprobs
from loadout._rpc.arrays import RoutedExperts as RoutedExperts
from loadout._rpc.server_info import ExpertLayers as ExpertLayers
from loadout._rpc.server_info import GenerationState as GenerationState
from loadout._rpc.server_info import MemoryUse as MemoryUse
from loadout._rpc.server_info import SamplingDefaults as SamplingDefaults
from loadout._rpc.server_info import ServerInfo as ServerInfo
from loadout._rpc.server_info import ServerLimits as ServerLimits

VersionPolicy = Literal["pin", "follow_keep", "follow_recompute"]
"""How a request reacts when its adapter's name moves to a newer version: finish on its own, or
continue with the newer one, with keys and values kept or recomputed."""


class FinishReason(enum.Enum):
    """Why a generation ended. UNKNOWN, here and below: the server is newer than this client."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class ImageState(enum.Enum):
    """State of an adapter's image for one layout."""

    PENDING = "pending"
    COMPILING = "compiling"
    READY = "ready"
    INCOMPATIBLE = "incompatible"
    UNKNOWN = "unknown"


class BaseModelSource(enum.Enum):
    """The rule that chose an adapter's base model. The store tries the rules in this order."""

    CALLER = "caller"
    CURRENT_VERSION = "current version"
    SERVED = "served"
    CONFIG = "config"
    DEFAULT = "default"
    ONLY_SERVED = "only served"
    UNKNOWN = "unknown"


class EventKind(enum.Enum):
    """Kind of a catalog change. BOOKMARK: nothing changed up to its revision."""

    REGISTERED = "registered"
    UPDATED = "updated"
    DELETED = "deleted"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    BOOKMARK = "bookmark"
    UNKNOWN = "unknown"


class AdapterTier(enum.Enum):
    """Memory that holds a resident adapter."""

    DEVICE = "device"
    HOST = "host"
    UNKNOWN = "unknown"


# --- the adapter store --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerVerdict:
    """Whether the servers of one announcement can serve an adapter."""

    announcement_id: str
    max_rank: int
    """Highest rank that these servers accept; 0 if they have not announced it."""
    servable: bool
    reason: str
    """Why they cannot serve it; otherwise ""."""


@dataclass(frozen=True, slots=True)
class LayoutState:
    """State of an adapter's image for one layout."""

    layout_id: str
    state: ImageState
    reason: str
    """Why the state is INCOMPATIBLE; otherwise ""."""
    image_bytes: int
    servers: tuple[ServerVerdict, ...] = ()
    """Verdicts of the layout's connected servers, one per announcement."""
    fits: bool = False
    """Whether the adapter is known to fit the layout, even before the image is compiled."""
    unused_spaces: tuple[str, ...] = ()
    """Parts of the model, such as "vision_tower", that the adapter changes but no request of these
    servers passes through."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A base model as some servers compute it, and the store's images for it."""

    layout_id: str
    base_model: str
    other_base_models: tuple[str, ...]
    """Base models of equal shapes with the same layout."""
    aliases: tuple[str, ...]
    """Other names of these base models."""
    max_ranks: tuple[int, ...]
    """Highest ranks that its servers accept, one per announcement; 0: any. Empty: no server now."""
    images: int
    """Number of compiled images."""
    image_bytes: int
    create_time: datetime | None
    last_use_time: datetime | None


@dataclass(frozen=True, slots=True)
class LayoutPage:
    """One page of the store's layouts. On the last page `next_page_token` is ""."""

    layouts: tuple[Layout, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of an adapter as the store fetched it; `sha256` is in hex."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of an adapter; `name` is "tenant/name"."""

    name: str
    version: int
    digest: str
    """Identity of the content, "sha256:<hex>"."""
    source_uri: str
    base_model: str
    rank: int
    """Largest rank of any target."""
    targets: tuple[str, ...]
    """Module names that it changes, such as "q_proj"."""
    source_bytes: int
    labels: Mapping[str, str]
    create_time: datetime | None
    update_time: datetime | None
    pinned: bool
    layout_states: tuple[LayoutState, ...]
    description: str = ""
    created_by: str = ""
    """Name of the token that recorded it; "" without tokens."""
    source_revision: str = ""
    """Revision of the source: a commit of the hub, ETags of S3."""
    config_base_model: str = ""
    """Base model as the adapter's own config names it."""
    files: tuple[SourceFile, ...] = ()
    signed_by: str = ""
    """Name of the key that verified its signature; "" if it is not signed."""
    delete_time: datetime | None = None
    """When it was deleted; None while it is live."""
    segment_kinds: tuple[SegmentKind, ...] = ()
    """Kinds of changes other than A and B."""
    added_tokens: int = 0
    """Tokens that it adds to the vocabulary; 0 until the store has planned an image of it."""
    invocation_tokens: tuple[int, ...] = ()
    """For aLoRA: it is active from the first of these tokens on, at the last place in the prompt
    where all of them occur in sequence."""
    tokenizer_digest: str = ""
    """Digest of its own tokenizer's extract; "": it uses the model's tokenizer."""
    chat_template_digest: str = ""
    """Digest of its own chat template; "": it uses the model's."""
    ephemeral: bool = False
    """Whether the content is kept only in the store's memory."""
    expire_time: datetime | None = None
    """When the store will delete it; None: never."""

    @property
    def ref(self) -> str:
        """Returns the reference of exactly this version, "tenant/name@version"."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a digest by key `key_id` of the store's policy; see `loadout.signing`."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Registration:
    """A recorded adapter."""

    adapter: Adapter
    revision: int
    """Catalog revision at which it became current. Pass it as `min_revision` to `generate` to be
    sure of this version or a newer one."""
    deleted_versions: tuple[int, ...] = ()
    """Older versions that `keep` or the store's policy deleted."""
    base_model_source: BaseModelSource = BaseModelSource.UNKNOWN
    base_model_reason: str = ""
    """How the base model was chosen, in words; "" after a rollback."""
    ignored_config_keys: tuple[str, ...] = ()
    """Unknown keys of the adapter's config that the store's operator allows."""
    warnings: tuple[str, ...] = ()
    """Warnings about the weights, such as values that are too large after a diverged training."""


@dataclass(frozen=True, slots=True)
class PrunedPage:
    """Versions that one call has deleted. `has_more`: there may be more to delete."""

    deleted_versions: tuple[int, ...]
    revision: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class AdapterPage:
    """One page of the catalog as of `revision`. On the last page `next_page_token` is ""."""

    adapters: tuple[Adapter, ...]
    next_page_token: str
    revision: int


@dataclass(frozen=True, slots=True)
class VersionPage:
    """One page of a name's versions, newest first. `current_version` is 0 for a deleted name."""

    adapters: tuple[Adapter, ...]
    next_page_token: str
    current_version: int
    revision: int


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """One catalog change. `version` is the name's version afterwards; 0 if the name is gone."""

    revision: int
    kind: EventKind
    name: str
    version: int
    digest: str
    time: datetime | None


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A tier that holds images; counts start with the store."""

    used_bytes: int
    capacity_bytes: int
    images: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """State of the store. `blob_bytes` is the size of stored sources."""

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
    """Sampling parameters of `generate`, `complete` and `sample`. A parameter that you leave out
    takes the server's default; see `ServerInfo.sampling_defaults`."""

    max_tokens: int
    """Most tokens to generate. Default: 256."""
    min_tokens: int
    """No end-of-sequence token and no stop before this many tokens. Default: 0."""
    temperature: float
    """0: greedy; otherwise 0.01 to 100. Default: the model's, or 1."""
    top_k: int
    """Sample from only this many most likely tokens. 0: off."""
    top_p: float
    """Sample from only the most likely tokens that together have this probability, above 0 and at
    most 1."""
    min_p: float
    """Sample from only tokens with at least this share of the most likely one's probability, 0 to
    1. Default: 0."""
    seed: int
    """The same seed gives the same tokens, regardless of other requests; on GPUs up to rounding."""
    stop: str | list[str] | tuple[str, ...]
    """Texts that end generation, at most 16. The returned text excludes them."""
    stop_token_ids: list[int] | tuple[int, ...]
    """Tokens that end generation, at most 256."""
    ignore_eos: bool
    """Continue after the model's end-of-sequence token. Default: False."""
    presence_penalty: float
    """Subtracted once from the logits of each generated token, -2 to 2. Default: 0."""
    frequency_penalty: float
    """Subtracted once per occurrence of a generated token, -2 to 2. Default: 0."""
    repetition_penalty: float
    """Divides positive logits and multiplies negative logits of tokens in prompt and output, 0.01
    to 100. Default: 1."""
    logprobs: int
    """Return the log probability of each token and of this many most likely tokens: at most 20, or
    1,024 with `packed_logprobs`."""
    logprobs_mode: Literal["raw", "processed"]
    """Distribution of `logprobs`: the model's own, or the one that the token was drawn from."""
    prompt_logprobs: int
    """Return the log probability of each prompt token except the first, and of this many (at most
    1,024) most likely tokens, from the model's own distribution."""


class ChatMessage(TypedDict):
    """A message by the role "developer", "system", "user", "assistant", or one of the template."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position; `top` begins with the most likely token."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_prompt_tokens` came from the prefix cache."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the queue, waiting for the adapter, and until the first token; server's clock."""

    queued_seconds: float
    adapter_wait_seconds: float
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class AdapterIdentity:
    """The version that a reference resolved to."""

    name: str
    """Name as "tenant/name@version"; the digest if you asked by digest."""
    digest: str
    is_inactive: bool = False
    """Whether the prompt lacks its invocation tokens (aLoRA), so that the base model answered."""
    scale: float | None = None
    """Factor of the adapter, if it is one of several."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a generation. `finish_reason`, `usage` and `timings` come with the last one.

    `adapter` is None for the base model, and for several adapters; those are in `adapters`.
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
    """If requested. A long prompt's experts take several chunks, of which only the last has
    tokens."""
    index: int = 0
    """Which of `n` answers this belongs to."""
    packed_logprobs: PackedLogprobs | None = None
    """In place of `logprobs`, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    """If requested. Only the first of several answers has them, before its tokens."""
    kept_tokens: int = 0
    """Number of tokens whose keys and values are from earlier versions."""
    echoed_tokens: int = 0
    """How many of `token_ids`, from the first, echo the prompt. No version made them."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation; `adapter` and `adapters` are as in Chunk."""

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
    """Experts that all tokens except the last have chosen, if requested."""
    packed_logprobs: PackedLogprobs | None = None
    """In place of `logprobs`, if requested."""
    prompt_logprobs: PackedLogprobs | None = None
    """For all prompt tokens except the first, if requested. Only the first of several answers has
    them."""
    versions: tuple[tuple[AdapterIdentity, int], ...] = ()
    """The adapter's versions that made its tokens, in order, each with its number of tokens. An
    echoed prompt does not count."""


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """An adapter in the inference service's memory."""

    digest: str
    names: tuple[str, ...]
    """Names known to point to it; if it is superseded, its last name with the version."""
    tier: AdapterTier
    num_bytes: int
    rank: int
    pinned: bool
    running_requests: int
    last_used_time: datetime | None
    load_seconds: float
    """Seconds from the first request for it until it was resident."""
    superseded: bool = False
    """Whether no name points to it any more."""
    not_finite_requests: int = 0
    """Requests that ended because the model's values were not finite. Not 0: its weights are too
    large; register a sound version."""

    @property
    def notes(self) -> str:
        """Returns facts for operators: "pinned", "3 not finite", or "" if there are none."""
        counted = f"{self.not_finite_requests} not finite" if self.not_finite_requests else ""
        return ", ".join(filter(None, ("pinned" if self.pinned else "", counted)))

    @property
    def label(self) -> str:
        """Returns its names, or its digest if it has none, and whether it is old:
        "team/french@3 (old)"."""
        return (", ".join(self.names) or self.digest) + " (old)" * self.superseded


@dataclass(frozen=True, slots=True)
class ResidentSegment:
    """A matrix or vector of an adapter, from byte `offset` of its memory."""

    kind: SegmentKind
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class ResidentTarget:
    """An adapter's part of one module; `layer` is None outside of layers."""

    name: str
    layer: int | None
    kind: TargetKind
    rank: int
    segments: tuple[ResidentSegment, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the size of all segments in bytes."""
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class ResidentExtent:
    """Contiguous bytes of an adapter, from byte `offset` of its memory."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OperationGroup:
    """Modules that are computed together, and the launches for them per decode step. `targets` are
    the adapter's modules. The step launches the group even if there are none, because it serves any
    mix of adapters."""

    name: str
    targets: tuple[str, ...]
    launches: int


@dataclass(frozen=True, slots=True)
class InspectedAdapter:
    """The parts of a resident adapter, in the memory that `adapter` names."""

    adapter: ResidentAdapter
    slot: int
    """Its row in that memory."""
    extents: tuple[ResidentExtent, ...]
    """Its place in that memory, in its own order."""
    targets: tuple[ResidentTarget, ...]
    groups: tuple[OperationGroup, ...]
    """Launches per decode step if this is the only adapter."""
    launches: int
    """Sum over the groups: kernels on a GPU, operations on a CPU."""
    kernels: str
    """The kernels that compute them, as in ServerInfo."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One of several replicas, as this client knows it."""

    address: str
    is_healthy: bool
    """Whether it takes calls."""
    num_requests: int
    """Requests that run or wait there."""
    max_sequences: int
    """Requests that may run at once; 0: it has published no load."""


# --- for operators of both ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DebugPart:
    """A file of diagnostics, such as "config.json"; `error` says why it has no content."""

    name: str
    content: bytes
    error: str


@dataclass(frozen=True, slots=True)
class TracePiece:
    """A piece of a gzipped trace in Chrome's JSON. `num_steps` is 0 except in the first."""

    data: bytes
    num_steps: int
