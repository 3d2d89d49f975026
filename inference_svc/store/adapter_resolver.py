"""Resolves adapter references: looked up in the store, cached, kept current by the watch.

Knows no transport: `Catalog` is the store's side, and the watch calls `apply`, `watch_started`,
`watch_lost` and `reset`. Everything runs on one event loop.

The store decides who may use which adapter: lookups are made on behalf of the caller, and another
tenant's adapters are to it, and so to us, as if they did not exist. An answer to one caller is
never given to another, unless both belong to the tenant that owns the adapter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from contract.images.segment_kinds import FURTHER_KINDS, SegmentKind
from inference_svc.adapters.layout import refused_kinds, refused_targets
from inference_svc.core import AdapterKey, Part, Principal, Sum, sum_label
from inference_svc.errors import (
    TRY_LATER,
    TRY_LATER_SEE_LOG,
    AdapterNotFound,
    AdapterUnusable,
    StoreUnavailable,
)
from inference_svc.store.content_owners import OwnershipCache
from inference_svc.store.name_cache import CachedName, LookupKey, NameCache
from inference_svc.store.superseded import SupersededVersions, Version
from inference_svc.store.types import AdapterRecord, Catalog, NameEvent
from servicekit.errors import ServiceError
from servicekit.refs import parse_ref, tenant_of

MIN_REVISION = "min_revision"
"""The subject of errors about a store that is behind."""
LIVE_SECONDS = 2.0
"""The watch sends events every second; silent for longer it counts as lost."""
STALE_WAIT_SECONDS = 1.0
"""How long a lookup may take where the last known answer would do."""
RETRY_SECONDS = 1.0
"""How long cached names are used without a lookup after one has failed."""
AHEAD_SECONDS = 0.5
"""How often one of the names that were not used here yet is looked up when it gets a version. An
adapter that was just registered is often asked for soon; each server asks the store at most so
often."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A resolved reference. `label` is "tenant/name@version", or the digest if that was the
    reference. With `invocation_tokens` it is active from the first of them on, where all of them
    follow one another in the prompt for the last time. `parts` are the adapters of a sum, and their
    factors; its `digest` is the sum in text. Its tokens and text are as in AdapterRecord; a sum has
    the ones of the adapter that adds tokens, and none if no adapter does. It `has_head`: it, or a
    part of it, has a classifier's head of its own, with these `class_labels` if they have names."""

    label: str
    tenant: str
    digest: str
    rank: int
    create_time_s: float = 0.0
    added_tokens: int = 0
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    invocation_tokens: tuple[int, ...] = ()
    parts: tuple[tuple[Binding, float], ...] = ()
    has_head: bool = False
    class_labels: tuple[str, ...] = ()

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[Binding, float]]) -> Binding:
        """Returns the sum of these adapters, in this order."""
        bindings = [binding for binding, _ in parts]
        # Two would each replace rows of the embedding, which ends the request.
        adding = next((binding for binding in bindings if binding.added_tokens), None)
        return cls(
            label=sum_label(binding.label for binding in bindings),
            tenant=",".join(binding.tenant for binding in bindings),
            digest=str(_sum_of(parts)),
            rank=sum(binding.rank for binding in bindings),
            create_time_s=max(binding.create_time_s for binding in bindings),
            added_tokens=0 if adding is None else adding.added_tokens,
            tokenizer_digest="" if adding is None else adding.tokenizer_digest,
            chat_template_digest="" if adding is None else adding.chat_template_digest,
            parts=tuple(parts),
            has_head=any(binding.has_head for binding in bindings),
            class_labels=next((each.class_labels for each in bindings if each.has_head), ()),
        )

    @property
    def key(self) -> AdapterKey:
        return _sum_of(self.parts) if self.parts else self.digest

    @property
    def names(self) -> tuple[str, ...]:
        """The label, or the labels of the parts."""
        return tuple([part.label for part, _ in self.parts]) or (self.label,)


def _sum_of(parts: Sequence[tuple[Binding, float]]) -> Sum:
    return Sum(tuple([Part(binding.digest, scale) for binding, scale in parts]))


@dataclass(frozen=True, slots=True)
class Servable:
    """This server's limits: adapters of these base models up to this rank, and, if it is restricted
    to `lora_targets`, that change none of its other `modules`, by themselves or as parts of one of
    `fused_modules`. An adapter may name modules in other ways, or have whole weights that equal the
    base's: then its image shows its changes. A whole weight of one of the `head_modules` is a
    classifier's head of the adapter's own."""

    base_models: tuple[str, ...]
    max_lora_rank: int
    lora_targets: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    fused_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_modules: frozenset[str] = frozenset()

    def has_head(self, record: AdapterRecord) -> bool:
        """Returns whether an adapter has a classifier's head of its own."""
        is_whole = SegmentKind.FULL in record.segment_kinds
        return is_whole and not self.head_modules.isdisjoint(record.targets)

    def refusal(self, record: AdapterRecord) -> tuple[str, str] | None:
        """Returns the contents of an adapter that this server does not apply, in words that follow
        "has", and their field; None if it applies everything."""
        changed: set[str] = set()
        for name in record.targets:
            changed.update(self.fused_modules.get(name, (name,)))
        refused = [
            name for name in self.modules if name in changed and name not in self.lora_targets
        ]
        may_equal_base = SegmentKind.FULL in record.segment_kinds
        if not may_equal_base and (reason := refused_targets(refused, self.lora_targets)):
            return reason, "targets"
        if reason := refused_kinds(
            each for each in record.segment_kinds if each not in FURTHER_KINDS
        ):
            return reason, "segment_kinds"
        return None


class Directory:
    """Resolves references. Without a catalog (no store) every reference is unknown.

    Entries are valid while the watch is live, because the watch removes changed ones. While the
    store is unreachable they keep resolving for `name_ttl_s` from when they were last valid.
    `layout_id` is set once the store has accepted the layout; `has_left` before this server ends
    its watch on purpose. It calls

    - `on_repointed` with the old and the new digest when a name in use here moves;
    - `on_moved` with any name that points to something else from a revision on, "" for perhaps all;
    - `on_superseded` with a digest that no name in use here points to any more (True), or that is
      used again (False);
    - `on_lookup` with the seconds that a caller waited for the store's answer.
    """

    def __init__(
        self,
        catalog: Catalog | None,
        servable: Servable,
        name_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        ahead_s: float = AHEAD_SECONDS,
    ) -> None:
        self.layout_id = ""
        self.revision = 0
        self.has_left = False
        self.on_repointed: Callable[[str, str], None] = lambda old_digest, new_digest: None
        self.on_moved: Callable[[str, int], None] = lambda name, revision: None
        self.on_superseded: Callable[[str, bool], None] = lambda digest, is_superseded: None
        self.on_lookup: Callable[[float], None] = lambda seconds: None
        self._catalog = catalog
        self._servable = servable
        self._name_ttl_s = name_ttl_s
        self._clock = clock
        self._ahead_s = ahead_s
        self._next_ahead_s = clock() + ahead_s
        self._cache = NameCache()
        self._owners = OwnershipCache()
        self._superseded = SupersededVersions(
            lambda digest, is_superseded: self.on_superseded(digest, is_superseded)
        )
        self._lookups: dict[LookupKey, asyncio.Task[AdapterRecord | None]] = {}
        # Revisions of changes that answers still under way may not reflect.
        self._changed_at: dict[str, int] = {}
        self._reset_at = 0
        self._is_watched = False
        self._valid_from = 0
        self._last_event_s = float("-inf")
        self._last_failure_s = float("-inf")

    # --- resolving ------------------------------------------------------------------------------

    async def resolve(
        self, principal: Principal, text: str, min_revision: int = 0, subject: str = "adapter"
    ) -> Binding:
        """Returns the adapter that `text` points to for this caller, at `min_revision` or later.

        Raises InvalidArgument (not a reference), AdapterNotFound (also for another tenant's),
        AdapterUnusable (with the reason) or StoreUnavailable.
        """
        binding = await self._resolve(principal, text, min_revision, subject)
        self._superseded.use(binding.digest)
        return binding

    async def _resolve(
        self, principal: Principal, text: str, min_revision: int = 0, subject: str = "adapter"
    ) -> Binding:
        ref = parse_ref(text, subject, principal.home_tenant)
        key = LookupKey.of(principal, ref)
        record = self._cached_if_live(key, min_revision) or await self._look_up(key, min_revision)
        for cache_key in key.cache_keys:
            self._cache.use(cache_key)
        tenant = tenant_of(record.name)
        if record.revision >= self._reset_at:  # older ones would miss the changes since
            self._owners.confirm(record.digest, record.name)
        try:
            self._check_servable(record)
        except AdapterUnusable:
            # It may become usable without an event, for example in a store that compiles more.
            self._cache.remove_version(record.name, record.version)
            raise
        label = ref.digest or f"{record.name}@{record.version}"
        return Binding(
            label,
            tenant,
            record.digest,
            record.rank,
            create_time_s=record.create_time_s,
            invocation_tokens=record.invocation_tokens,
            added_tokens=record.added_tokens,
            tokenizer_digest=record.tokenizer_digest,
            chat_template_digest=record.chat_template_digest,
            has_head=self._servable.has_head(record),
            class_labels=record.class_labels,
        )

    def names_of(self, principal: Principal, digest: str, limit: int | None = None) -> list[str]:
        """Returns the caller's names, with or without version, known to point to a digest, sorted;
        at most the `limit` longest cached ones. Of a superseded one its last version; of one that
        was not requested since a name moved to it, the version of the watch's event."""
        label = self._superseded.label(digest)
        refs = chain(filter(None, (label,)), self._cache.refs_of(digest))
        names = (ref for ref in refs if not ref.endswith(digest))
        own = set(islice((name for name in names if principal.is_for(tenant_of(name))), limit))
        if not own:
            moved = self._superseded.moved_to(digest)
            own = set(islice((name for name in moved if principal.is_for(tenant_of(name))), limit))
        return sorted(own)

    def is_superseded(self, principal: Principal, digest: str) -> bool:
        """Returns whether one of the caller's names in use here pointed to this digest, none of
        anybody's does any more, and nobody has used it since."""
        label = self._superseded.label(digest)
        return bool(label) and principal.is_for(tenant_of(label))

    def is_owner(self, principal: Principal, digest: str) -> bool:
        """Returns whether one of the caller's tenants has used a digest here and has it, or has had
        it until lately; or the caller is for all tenants."""
        tenants = principal.tenants
        return tenants is None or self._owners.is_owner(tenants, digest, self._clock())

    async def owned(self, principal: Principal, digests: Collection[str]) -> set[str]:
        """Returns the digests that the caller owns. Stale claims are looked up in the store; while
        it is unreachable they count for nothing."""
        tenants = principal.tenants
        for digest in digests if tenants is not None else ():
            assert tenants is not None
            if not self._owners.needs_revalidation(tenants, digest, self._clock()):
                continue
            try:
                await self._resolve(principal, digest)
            except AdapterNotFound:
                self._owners.remove(tenants, digest)
            except AdapterUnusable:
                pass  # owned, whether or not it can be served
            except ServiceError:
                break
        return {digest for digest in digests if self.is_owner(principal, digest)}

    @property
    def is_live(self) -> bool:
        """Whether the watch has sent an event lately, so that entries are valid."""
        return self._is_watched and self._clock() - self._last_event_s < LIVE_SECONDS

    def _cached_if_live(self, key: LookupKey, min_revision: int) -> AdapterRecord | None:
        entry = self._cached(key, min_revision)
        return entry.record if entry is not None and self.is_live else None

    def _cached(self, key: LookupKey, min_revision: int) -> CachedName | None:
        """Returns an entry that reflects `min_revision`."""
        for cache_key in key.cache_keys:
            entry = self._cache.get(cache_key)
            if entry is not None and max(entry.record.revision, self.revision) >= min_revision:
                return entry
        return None

    async def _look_up(self, key: LookupKey, min_revision: int) -> AdapterRecord:
        """Returns the store's answer, or the last known one while the store is unreachable."""
        stale, start_s = self._cached_if_recent(key, min_revision), self._clock()
        if stale is not None and start_s - self._last_failure_s < RETRY_SECONDS:
            return stale
        try:
            async with asyncio.timeout(None if stale is None else STALE_WAIT_SECONDS):
                record = await self._fetch(key, min_revision)
            self.on_lookup(self._clock() - start_s)
            return record
        except TimeoutError:
            self._last_failure_s = self._clock()
            error = StoreUnavailable("the adapter store does not answer")
        except StoreUnavailable as unavailable:
            error = unavailable
        stale = self._cached_if_recent(key, min_revision)
        if stale is not None:
            return stale
        # A store that is behind has not failed: nothing of it is logged.
        advice = TRY_LATER if error.subject == MIN_REVISION else TRY_LATER_SEE_LOG
        message = f"adapter {key.ref} cannot be looked up: {error.message}; {advice}"
        raise StoreUnavailable(message, subject=error.subject) from error

    def _cached_if_recent(self, key: LookupKey, min_revision: int) -> AdapterRecord | None:
        entry = self._cached(key, min_revision)
        if entry is None:
            return None
        # Entries that the watch had not removed were valid at its last event.
        age_s = self._clock() - max(entry.fetched_s, self._last_event_s)
        return entry.record if age_s < self._name_ttl_s else None

    async def _fetch(self, key: LookupKey, min_revision: int) -> AdapterRecord:
        """Shares one lookup among callers; repeats it while the answer is older than required."""
        for delay_s in (0.0, 0.0, 0.05, 0.2, 0.5):
            if delay_s:
                await asyncio.sleep(delay_s)
            task = self._lookups.get(key) or self._start_lookup(key)
            # A caller that is cancelled must not cancel the others' lookup.
            record = await asyncio.shield(task)
            if record is None:
                continue
            if record.revision >= max(min_revision, self._changed_at.get(record.name, 0)):
                return record
        raise StoreUnavailable(
            f"the store has not reached revision {max(min_revision, self.revision)}",
            subject=MIN_REVISION,
        )

    def _start_lookup(
        self, key: LookupKey, *, is_ahead: bool = False
    ) -> asyncio.Task[AdapterRecord | None]:
        def done(task: asyncio.Task[AdapterRecord | None]) -> None:
            del self._lookups[key]
            if not task.cancelled():
                task.exception()  # retrieved, even if every caller has been cancelled

        task = self._lookups[key] = asyncio.create_task(self._fetch_once(key, is_ahead))
        task.add_done_callback(done)
        return task

    async def _fetch_once(self, key: LookupKey, is_ahead: bool) -> AdapterRecord | None:
        """Returns None for the answer of a replica that is behind the watch."""
        if self._catalog is None:
            raise AdapterNotFound("this server has no adapter store", subject="adapter")
        fetched_s, watched_revision = self._clock(), self.revision
        try:
            record = await self._catalog.get_adapter(str(key.ref), key.tenants or ())
            cache_key = key.cache_key_of(record)
        except StoreUnavailable:
            self._last_failure_s = self._clock()
            raise
        except ServiceError:
            for each in key.cache_keys:
                self._cache.remove(each)
            raise
        if record.revision < watched_revision:
            return None
        if record.revision >= max(self._reset_at, self._changed_at.get(record.name, 0)):
            self._cache.put(cache_key, CachedName(record, fetched_s, is_ahead))
        return record

    def is_servable(self, record: AdapterRecord) -> bool:
        """Returns whether this server accepts requests for it."""
        try:
            self._check_servable(record)
        except AdapterUnusable:
            return False
        return True

    def _check_servable(self, record: AdapterRecord) -> None:
        """Raises AdapterUnusable. Also of a model of another name, whose layout may be ours."""
        name, servable = f"{record.name}@{record.version}", self._servable
        verdict = record.verdicts.get(self.layout_id)
        if record.base_model not in servable.base_models:
            raise AdapterUnusable(
                f"adapter {name} is for base model {record.base_model!r}; "
                f"this server runs {servable.base_models[0]!r}",
                subject="base_model",
            )
        if verdict is not None and not verdict.servable:
            raise AdapterUnusable(
                f"adapter {name} cannot be served: {verdict.reason}", subject=record.name
            )
        if record.rank > servable.max_lora_rank:
            raise AdapterUnusable(
                f"adapter {name} has rank {record.rank}, above this server's --max-rank "
                f"{servable.max_lora_rank}",
                subject="rank",
            )
        if (refusal := servable.refusal(record)) is not None:
            raise AdapterUnusable(f"adapter {name} has {refusal[0]}", subject=refusal[1])

    # --- called by the watch --------------------------------------------------------------------

    def watch_started(self, revision: int) -> None:
        """Called when a watch starts behind `self.revision` and the catalog is at `revision`:
        entries are valid again once the events up to there have come."""
        self._valid_from = revision
        self._is_watched = self.revision >= revision
        if self._is_watched:
            self._last_event_s = self._clock()

    def apply(self, event: NameEvent) -> None:
        """Applies the watch's next event, in order."""
        self.revision = max(self.revision, event.revision)
        if self.revision >= self._valid_from:
            self._is_watched = True
            self._last_event_s = self._clock()
        if not self._lookups:
            self._changed_at.clear()
        if event.name:
            self._move(event)
            self._owners.mark_stale(event.name, self._clock())
            self._changed_at[event.name] = event.revision
            if event.digest:
                self.on_moved(event.name, event.revision)

    def _move(self, event: NameEvent) -> None:
        """Forgets a name's target, and remembers the former one if it is in use here. Looks up the
        new one, before somebody has to wait for it: of names in use here always."""
        cached = self._cache.get(event.name)
        if cached is not None and cached.is_ahead:
            cached = None
        self._cache.remove_name(event.name)
        old = self._superseded.previous(event.name)
        if cached is not None:
            record = cached.record
            old = Version(f"{record.name}@{record.version}", record.digest)
        if old is None:
            self._look_ahead(event)
            return
        new = Version(f"{event.name}@{event.version}", event.digest) if event.digest else None
        if new is not None and new.digest != old.digest:
            self.on_repointed(old.digest, new.digest)
            key = LookupKey(parse_ref(event.name, "adapter"), None)
            if cached is not None and key not in self._lookups:
                self._start_lookup(key)
        is_used = any(True for _ in self._cache.refs_of(old.digest))
        self._superseded.move(event.name, old, new, is_used=is_used)

    def _look_ahead(self, event: NameEvent) -> None:
        """Looks up a name that is not in use here yet, now and then."""
        key, now_s = LookupKey(parse_ref(event.name, "adapter"), None), self._clock()
        is_due = self._is_watched and now_s >= self._next_ahead_s
        if event.digest and is_due and key not in self._lookups:
            self._next_ahead_s = now_s + self._ahead_s
            self._start_lookup(key, is_ahead=True)

    def watch_lost(self) -> None:
        """Called when the watch ended: changes are no longer removed."""
        self._is_watched = False

    def reset(self, revision: int) -> None:
        """Forgets all names: the next watch starts behind `revision`, and earlier changes are
        unknown."""
        self._cache.clear()
        self._owners.mark_all_stale(self._clock())
        self._changed_at.clear()
        self._reset_at = revision
        self.revision = revision
        self.on_moved("", revision)
