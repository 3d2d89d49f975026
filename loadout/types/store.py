"""Types of the store: adapters and their versions, layouts, events, tiers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from contract.images.segment_kinds import SegmentKind


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


@dataclass(frozen=True, slots=True)
class ServerVerdict:
    """Whether the servers of one announcement can serve an adapter."""

    announcement_id: str
    max_rank: int
    """Highest rank that these servers accept; 0 if they have not announced it."""
    servable: bool
    reason: str
    """Why they cannot serve it; otherwise ""."""
    note: str = ""
    """That they hold the base model in another form than it was trained on, such as in INT4."""
    num_ranks: int = 0
    """How many processes compute the model together, each with a layout and verdict of its own; 0:
    one, or the server or the store is too old to report it. All must be able to serve it."""
    rank_index: int = 0
    """Which of them this verdict is about."""
    first_announcement_id: str = ""
    """The first one's `announcement_id`, in the verdicts of the others."""


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
    class_labels: tuple[str, ...] = ()
    """Names of its own classifier's outputs, from the `config.json` next to its weights."""
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
    """State of the store. `blob_bytes` is the size of stored sources. `memory_locked`: images are
    never swapped out; `memory_unlocked_reason` is why they could be."""

    version: str
    revision: int
    adapters: int
    layouts: int
    memory: TierStatus
    disk: TierStatus
    blob_bytes: int
    active_pulls: int
    memory_locked: bool = False
    memory_unlocked_reason: str = ""
