"""Plain data that every module of the store shares."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import repeat
from typing import NamedTuple, Protocol, TypeAlias

from contract.base_model_names import trained_form
from contract.images.segment_kinds import KIND_WORDS, SegmentKind
from contract.words import listed
from servicekit.auth import principal
from servicekit.auth.principal import Roles
from servicekit.refs import AdapterName


class Action(enum.Enum):
    """The action of a call; every RPC is one of these."""

    READ = "read adapters"
    PULL = "pull images"
    PUBLISH = "change adapters"
    PIN = "pin or unpin adapters"
    REGISTER_LAYOUT = "register layouts"
    FORGET_LAYOUT = "forget layouts"
    STATUS = "read the store's status"
    INSPECT = "debug the store"


ROLES = Roles(
    {
        "reader": frozenset({Action.READ, Action.PULL}),
        "publisher": frozenset({Action.READ, Action.PUBLISH}),
        "server": frozenset({Action.READ, Action.PULL, Action.REGISTER_LAYOUT, Action.STATUS}),
        "admin": frozenset(Action),
    },
    foreign=frozenset({"caller", "operator"}),  # the inference service's
)

Principal: TypeAlias = principal.Principal[Action]

ANYONE = ROLES.anyone
"""Every caller, where there is no policy."""

Tenants: TypeAlias = frozenset[str] | None
"""The tenants that something is confined to; None for all."""


class ImageKey(NamedTuple):
    """Identifies an image: an adapter's digest under a layout."""

    digest: str
    layout_id: str


class ImageState(enum.Enum):
    PENDING = "pending"
    COMPILING = "compiling"
    READY = "ready"
    INCOMPATIBLE = "incompatible"


class EventKind(enum.Enum):
    REGISTERED = "registered"
    UPDATED = "updated"
    DELETED = "deleted"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    BOOKMARK = "bookmark"


class Part(NamedTuple):
    """Which of `num_ranks` processes, that compute a model together, a layout is of; 0: there is
    one. `first_announcement_id` is the one of the first, in those of the others."""

    num_ranks: int = 0
    rank_index: int = 0
    first_announcement_id: str = ""


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Announcement:
    """A server's announcement: its name of the base model, "" for the layout's, and further ones,
    its highest rank, 0 for any, and the further contents that it applies. It counts for as long as
    the server watches, and lasts an hour more; of servers that do not renew it, as long as the
    layout, or until those that have replaced them have gone for an hour.

    `segment_kinds` are those beside A and B. `lora_targets` are last components of targets' names
    that the server is restricted to; none: it applies all targets. `weight_form` is the form in
    which it holds the base model's weights, such as "int4"; "": plain.
    """

    aliases: tuple[str, ...] = ()
    max_rank: int = 0
    is_renewed: bool = True
    base_model: str = ""
    segment_kinds: tuple[SegmentKind, ...] = ()
    lora_targets: tuple[str, ...] = ()
    max_added_tokens: int = 0
    applies_invocation_tokens: bool = False
    weight_form: str = ""
    part: Part = WHOLE


class Demands(Protocol):
    """The needs of an adapter, for any layout of a server."""

    @property
    def rank(self) -> int: ...
    @property
    def invocation_tokens(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one announcement; see there. `expire_time`, in microseconds since the epoch, is
    an hour after it was last made or renewed, and `last_use_time` is its layout's: they decide
    whether its servers are there, see lookup.present."""

    announcement_id: str
    max_rank: int
    expire_time: int = field(default=0, compare=False)
    is_renewed: bool = field(default=True, compare=False)
    last_use_time: int = field(default=0, compare=False)
    names: frozenset[str] = field(default=frozenset(), compare=False)
    """Of the base model; none: the layout's."""
    segment_kinds: tuple[SegmentKind, ...] = ()
    lora_targets: tuple[str, ...] = ()
    max_added_tokens: int = 0
    applies_invocation_tokens: bool = False
    weight_form: str = ""
    part: Part = WHOLE

    def note(self, config_base_model: str) -> str:
        """Returns the difference between the servers' base model and the one that an adapter was
        trained on, which its config names; "" if there is none, or the name does not tell."""
        trained = trained_form(config_base_model)
        if trained is None or trained.is_served_as(self.weight_form):
            return ""
        served = self.weight_form or "plain weights"
        return (
            f"trained on the {trained.name} form of the base model, served on {served}: answers "
            f"may differ; serve the {trained.name} checkpoint for the answers of training"
        )

    def refusal(self, adapter: AdapterRecord, verdict: LayoutVerdict) -> str:
        """Returns why the servers cannot serve this adapter, whose verdict under their layout this
        is; "" if they can, as far as is known."""
        return verdict.reason or "; ".join(self.refusals(adapter, verdict.changes(adapter)))

    def serve(self, base_model: str) -> bool:
        """Returns whether these are servers of a base model that their layout is known for."""
        return not self.names or base_model in self.names

    def refusals(self, adapter: Demands, changes: ImageContent) -> Iterator[str]:
        """Yields the reasons why the servers do not accept an adapter with an image that changes
        this."""
        if self.max_rank and adapter.rank > self.max_rank:
            yield f"rank {adapter.rank} is above this server's limit {self.max_rank} (--max-rank)"
        refused = [name for name in changes.modules if name not in self.lora_targets]
        if self.lora_targets and refused:
            what = "target {} is" if len(refused) == 1 else "targets {} are"
            yield (
                f"{what.format(listed(refused))} not among this server's --lora-targets "
                f"({listed(self.lora_targets)})"
            )
        refused_of: dict[str, list[str]] = {}
        for kind, names in changes.by_kind():
            if kind not in self.segment_kinds:
                refused_of.setdefault(KIND_WORDS[kind], []).extend(names)
        for what, found in refused_of.items():
            of = listed(sorted(set(found)))
            remedy = f"; {REMEDY}" if what in REPLACES else ""
            yield f"it has {what}, which this server does not apply" + (of and f": {of}{remedy}")
        if changes.added_tokens > self.max_added_tokens:
            yield (
                f"tokens that it adds to the vocabulary: {changes.added_tokens}, above this "
                f"server's limit {self.max_added_tokens} (--max-added-tokens)"
            )
        if adapter.invocation_tokens and not self.applies_invocation_tokens:
            yield "it has invocation tokens (aLoRA), which this server does not apply"
        if self.part.num_ranks > 1:
            yield from _refusals_of_ranks(changes)


def _refusals_of_ranks(changes: ImageContent) -> Iterator[str]:
    """Yields the reasons why a server of several processes does not accept an image."""
    if changes.uneven_experts:
        yield (
            f"its experts have A and B of different sizes, or some have none: "
            f"{listed(changes.uneven_experts)}; with --expert-parallel each process must get as "
            "many bytes as the others: serve it without the setting"
        )
    if changes.shared_biases:
        yield (
            f"it has biases in place of the base's, which this server does not apply with "
            f"--fully-sharded-loras: {listed(changes.shared_biases)}; serve it without the setting"
        )


REPLACES = frozenset(KIND_WORDS[kind] for kind in (SegmentKind.ROWS, SegmentKind.FULL))
REMEDY = "save the adapter without it, and adapt a matrix with A and B instead"


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The bytes of one layer, or of the embedding or the head, which one layer_end covers."""

    index: int
    start: int
    end: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a tenant; None for no limit. `max_bytes` limits its stored source."""

    max_adapters: int | None = None
    max_bytes: int | None = None


class ImageContent(NamedTuple):
    """The contents of an image: last components of its targets' names in the layout, its contents
    beside A and B, and of which targets. `added_tokens` are the adapter's, whichever rank holds
    their rows. `unused_spaces` are the spaces of its targets that no request passes through.

    Of a layout that is a rank's, the names without layers of contents that ranks cannot compute
    together: `uneven_experts` are targets of experts whose sizes differ between the ranks' parts,
    `shared_biases` are in place of the base's, of targets of which each rank has some inputs and
    some outputs.
    """

    modules: tuple[str, ...]
    segment_kinds: tuple[SegmentKind, ...]
    names: tuple[tuple[str, ...], ...] = ()
    """The names of the targets of each of `segment_kinds`, without layers."""
    added_tokens: int = 0
    unused_spaces: tuple[str, ...] = ()
    uneven_experts: tuple[str, ...] = ()
    shared_biases: tuple[str, ...] = ()

    def by_kind(self) -> Iterator[tuple[SegmentKind, tuple[str, ...]]]:
        """Yields the kinds with the names of their targets, as far as these are known."""
        yield from zip(self.segment_kinds, self.names or repeat(()), strict=False)


@dataclass(frozen=True, slots=True)
class LayoutVerdict:
    """State of one adapter's image under one layout."""

    layout_id: str
    state: ImageState
    reason: str = ""
    image_bytes: int = 0
    build_micros: int = 0
    """How long the build took that gave the verdict."""
    build_time: int = field(default=0, compare=False)
    """When that began, in microseconds since the epoch: later records hide the verdict as long."""
    retry_micros: int = 0
    """How long after a failed build it is tried again; 0: the verdict is final."""
    is_hidden: bool = False
    """Whether it is shown as PENDING for that reason: there is nothing to build."""
    servers: tuple[ServerLimits, ...] = ()
    fits: bool = field(default=False, compare=False)
    """Whether the adapter's shapes are known to fit the layout, maybe before its image is built."""
    content: ImageContent | None = field(default=None, compare=False)
    """The contents of the image, once it has been planned; earlier releases did not record it."""

    @property
    def unused_spaces(self) -> tuple[str, ...]:
        return () if self.content is None else self.content.unused_spaces

    def changes(self, adapter: AdapterRecord) -> ImageContent:
        """Returns the known changes of the layout by the adapter. Until its image is planned that
        is little: it may call targets by other names, or have weights that equal the base's."""
        if self.content is not None:
            return self.content
        if self.state is ImageState.READY:  # of an earlier release: of plain LoRA
            return ImageContent(adapter.targets, adapter.segment_kinds)
        certain = (kind for kind in adapter.segment_kinds if kind is not SegmentKind.FULL)
        return ImageContent((), tuple(certain))


@dataclass(frozen=True, slots=True)
class LayoutInfo:
    """A layout, and the store's records for it. `aliases` are of any of its base models;
    `max_ranks` are the present servers' limits, one for each announcement, 0 for any rank;
    `last_use_time` is known to the hour."""

    layout_id: str
    base_model: str
    other_base_models: tuple[str, ...]
    aliases: tuple[str, ...]
    max_ranks: tuple[int, ...]
    num_images: int
    image_bytes: int
    create_time: datetime
    last_use_time: datetime


class SignatureState(enum.Enum):
    UNSIGNED = "unsigned"
    VERIFIED = "verified"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file as it was fetched; `sha256` in hex."""

    name: str
    size_bytes: int
    sha256: str


MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class BlobPlace:
    """Where shared blobs store a digest's files; empty if every store has its own blobs.

    MEMORY is the memory of the store's process: the blob is gone with that.
    For a blob that was just stored also the lease that it was stored under, the lease's owner, and
    the place that it replaces.
    """

    place: str = ""
    files: tuple[SourceFile, ...] = ()
    lease: str = ""
    owner: str = ""
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One version of an adapter, as recorded in the catalog.

    `signed_by` is the key that verified `signature` when the version was recorded, "" for none.
    After `delete_time` the version is no longer resolved, and only kept for the grace.
    `segment_kinds` are its contents beside A and B; of aLoRA, it is active from the first of its
    `invocation_tokens` on, where all of them follow one another in the prompt for the last time.
    The digests of its tokenizer's extract and of its chat template are "" where it has none, and
    `class_labels` the names of its own classifier's outputs. The content of an `ephemeral` one is
    gone with the store's process, unless replicas share it.
    """

    name: AdapterName
    version: int
    digest: str
    source_uri: str
    base_model: str
    rank: int
    targets: tuple[str, ...]
    source_bytes: int
    create_time: datetime
    update_time: datetime
    pinned: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    verdicts: tuple[LayoutVerdict, ...] = ()
    description: str = ""
    created_by: str = ""
    source_revision: str = ""
    config_base_model: str = ""
    files: tuple[SourceFile, ...] = ()
    signed_by: str = ""
    signature: bytes = b""
    delete_time: datetime | None = None
    segment_kinds: tuple[SegmentKind, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    class_labels: tuple[str, ...] = ()
    ephemeral: bool = False
    expire_time: datetime | None = None

    @property
    def added_tokens(self) -> int:
        """Returns how many tokens it adds to the vocabulary: rows of the embedding or the head
        behind the base's. Layouts say how many it has: 0 until an image is planned."""
        found = [each.content.added_tokens for each in self.verdicts if each.content is not None]
        return max(found, default=0)

    @property
    def unplanned_layout(self) -> str:
        """Returns a layout whose plan would say how many tokens the adapter adds, "" where that is
        known, or there is none: it has whole weights or rows, and no image of it was planned."""
        may_add = not {SegmentKind.FULL, SegmentKind.ROW_IDS}.isdisjoint(self.segment_kinds)
        if not may_add or any(each.content is not None for each in self.verdicts):
            return ""
        pending = (each for each in self.verdicts if each.state is ImageState.PENDING)
        return next((each.layout_id for each in pending), "")

    @property
    def message_bytes(self) -> int:
        """About the bytes of its message; never less."""
        texts = [str(self.name), self.digest, self.source_uri, self.base_model, self.description]
        texts += [self.created_by, self.source_revision, self.config_base_model, self.signed_by]
        texts += [self.tokenizer_digest, self.chat_template_digest, *self.class_labels]
        texts += [*self.targets, *self.labels, *self.labels.values()]
        texts += [part for each in self.verdicts for part in (each.layout_id, each.reason)]
        texts += [space for each in self.verdicts for space in each.unused_spaces]
        texts += [
            part
            for each in self.verdicts
            for server in each.servers
            for part in _texts_of(server, self, each)
        ]
        texts += [part for file in self.files for part in (file.name, file.sha256)]
        # A character is at most four bytes; most texts are ASCII.
        text_bytes = sum(
            16 + (len(text) if text.isascii() else len(text.encode())) for text in texts
        )
        numbers = 5 * len(self.invocation_tokens) + len(self.segment_kinds)
        return text_bytes + numbers + 32 * (len(self.verdicts) + len(self.files) + 5)

    @property
    def signature_state(self) -> SignatureState:
        return SignatureState.VERIFIED if self.signed_by else SignatureState.UNSIGNED


def _texts_of(server: ServerLimits, adapter: AdapterRecord, verdict: LayoutVerdict) -> list[str]:
    """Returns the texts of a server's verdict."""
    note = server.note(adapter.config_base_model)
    ids = [server.announcement_id, server.part.first_announcement_id]
    return [*ids, server.refusal(adapter, verdict), note]


class Pruned(NamedTuple):
    """Versions that were deleted, at which revision, and whether there may be more to delete."""

    deleted_versions: tuple[int, ...]
    revision: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """One catalog change. `version` is the name's version afterwards, 0 if it is deleted."""

    revision: int
    kind: EventKind
    name: str
    version: int
    digest: str
    time: datetime

    @property
    def tenant(self) -> str:
        return self.name.partition("/")[0]


class BaseModelSource(enum.Enum):
    """The rule that decided for which base model an adapter is recorded; the first that applies."""

    CALLER = "caller"
    CURRENT_VERSION = "current version"
    SERVED = "served"
    CONFIG = "config"
    DEFAULT = "default"
    ONLY_SERVED = "only served"


@dataclass(frozen=True, slots=True)
class BaseModelChoice:
    """The name of an adapter's base model, the rule that decided for it, and that rule in words."""

    name: str
    source: BaseModelSource
    reason: str


class Recorded(NamedTuple):
    """A change of a name: the record, the revision at which it is current, the numbers of versions
    that were deleted for it; of a registration its base model, unknown keys and warnings."""

    record: AdapterRecord
    revision: int
    deleted_versions: tuple[int, ...] = ()
    base_model: BaseModelChoice | None = None
    ignored_config_keys: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
