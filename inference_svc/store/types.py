"""The store's catalog as this service sees it: its records, pages and events, and the protocols of
stores. Knows no transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.layout import ModelLayout


@dataclass(frozen=True, slots=True)
class LayoutVerdict:
    """The store's verdict on an adapter under a layout; `reason` if it cannot be served."""

    servable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One version of an adapter as the store described it when its catalog was at `revision`.
    `create_time_s`, a `time.time()`, is when the version was registered. `targets` are last
    components of the names that it gives to modules, `segment_kinds` its contents beside A and B,
    numbers of kinds that this release does not know;
    of aLoRA it is active from its `invocation_tokens` on. It has rows for `added_tokens` behind the
    model's vocabulary. Digests of its tokenizer and its chat template are "" for none;
    `class_labels` are names of the outputs of a classifier's head of its own."""

    name: str
    version: int
    digest: str
    rank: int
    base_model: str
    revision: int
    verdicts: Mapping[str, LayoutVerdict] = field(default_factory=dict)
    create_time_s: float = 0.0
    targets: tuple[str, ...] = ()
    segment_kinds: tuple[SegmentKind | int, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    added_tokens: int = 0
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    class_labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The location of an adapter's files. `base_model` "": the store chooses; `default_base_model`
    if nothing else says which. With an `expected_digest` other content is refused."""

    uri: str
    base_model: str = ""
    default_base_model: str = ""
    expected_digest: str = ""


@dataclass(frozen=True, slots=True)
class Registered:
    """A registration: the revision from which the name points to the adapter, its base model, how
    the store chose that, in words, the unknown keys of the adapter's config that the store's
    operator lets pass, and warnings for its trainer."""

    revision: int
    base_model: str
    base_model_reason: str
    ignored_config_keys: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Announcement:
    """This server's announcement beside its layout: further names of the base model, the highest
    rank that it accepts, the targets that it is restricted to, if it is, the kinds of segments that
    it applies besides A and B, how many tokens adapters may add, and the form of the base model's
    weights, "" for plain ones. Adapters are applied from their invocation tokens on, if they have
    any. Of several ranks each has one of its own, with its index and their number; all but the
    first's have the first's id."""

    aliases: tuple[str, ...]
    max_rank: int
    lora_targets: tuple[str, ...] = ()
    segment_kinds: tuple[SegmentKind, ...] = ()
    max_added_tokens: int = 0
    weight_form: str = ""
    num_ranks: int = 0
    rank_index: int = 0
    first_announcement_id: str = ""


class AcceptedLayout(NamedTuple):
    """The store's ids of a layout, and of the announcement, which a watch renews: "" of a store of
    an earlier release."""

    layout_id: str
    announcement_id: str


class AdapterPage(NamedTuple):
    """`next_token` requests the next page; "" on the last one."""

    records: list[AdapterRecord]
    next_token: str


@dataclass(frozen=True, slots=True)
class NameEvent:
    """A change of `name`, which points to `digest` from then on, the content of its `version`, or
    to nothing; with `name` "", a bookmark: nothing changed up to `revision`."""

    revision: int
    name: str = ""
    digest: str = ""
    version: int = 0


class HistoryGone(Exception):
    """Raised when the store no longer has the events from where the watch should start."""


class Catalog(Protocol):
    async def get_adapter(self, ref: str, tenants: Collection[str] = ()) -> AdapterRecord:
        """Returns the adapter that callers of these tenants may see; without tenants, one that
        anyone may see. Raises AdapterNotFound, StoreUnavailable or another ServiceError."""
        ...


class TextSource(Protocol):
    async def get_text(self, digest: str) -> bytes:
        """Returns the extract of a tokenizer, or a chat template, as its digest says. Raises
        AdapterNotFound, CorruptImage, StoreUnavailable."""
        ...


class Registry(Protocol):
    """Every method raises StoreUnavailable when no replica answers."""

    async def register(self, name: str, source: Source, token: str | None) -> Registered:
        """Registers an adapter on behalf of the token's owner, whom the store authorises.

        Raises PermissionDenied, InvalidArgument (naming the store's field), AdapterUnusable,
        QueueFull for a quota, or another ServiceError.
        """
        ...

    async def list_adapters(
        self, tenants: Collection[str], page_size: int, page_token: str
    ) -> AdapterPage:
        """Returns current versions of these tenants' adapters (without any: of all that this
        server may see), ordered by tenant and name. Raises InvalidArgument for a token of another
        list."""
        ...


class CatalogSession(Protocol):
    """One replica's catalog. Every method raises StoreUnavailable when it does not answer."""

    @property
    def source(self) -> str: ...
    async def register_layout(
        self, layout: ModelLayout, announcement: Announcement
    ) -> AcceptedLayout: ...
    async def get_revision(self) -> int: ...
    def watch(self, since_revision: int, announcement_id: str) -> AsyncIterator[NameEvent]:
        """Yields changes after a revision, in order, and bookmarks, and renews the announcement
        meanwhile. Raises HistoryGone."""
        ...


class WatchedCatalog(Protocol):
    async def connect(self, avoid: Collection[str] = ()) -> CatalogSession:
        """Returns a session with a replica that is none of `avoid`, if there is another."""
        ...
