"""What adapter references point to: resolved at the store, cached, kept true by its watch.

Knows nothing of transport: `Catalog` is the store's side, and whoever watches the store calls
`apply`, `lost` and `reset`. Everything runs on one event loop.

Who may use what is the store's knowledge: it is asked on behalf of the caller, and what another
tenant has is to it, and so to us, as if it were not there. No answer to one caller is another's,
unless both are for the tenant that has the adapter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from inference_svc.access import Principal
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    InferenceError,
    StoreUnavailable,
)
from inference_svc.refs import parse_ref, tenant_of
from inference_svc.store.name_cache import AdapterRecord, CachedName, NameCache
from inference_svc.store.ownership import Owners
from inference_svc.store.questions import Question

LIVE_SECONDS = 2.0
"""The watch speaks every second; silent for longer it counts as lost, and names are asked for."""
PATIENCE_SECONDS = 1.0
"""How long an answer is waited for where the last known one would do."""
RETRY_SECONDS = 1.0
"""After the store did not answer, cached names are used this long without asking again."""


@dataclass(frozen=True, slots=True)
class NameEvent:
    """A catalog change of `name`, which points to `digest` from then on, or to nothing; with `name`
    "", a bookmark: nothing changed up to `revision`."""

    revision: int
    name: str = ""
    digest: str = ""


class Catalog(Protocol):
    async def get_adapter(self, ref: str, tenants: Collection[str] = ()) -> AdapterRecord:
        """What the store tells a caller of these tenants; none: of any. Raises AdapterNotFound,
        StoreUnavailable or another InferenceError."""
        ...


@dataclass(frozen=True, slots=True)
class Binding:
    """What a reference resolved to. `label` is "tenant/name@version", or the digest if asked so."""

    label: str
    tenant: str
    digest: str
    rank: int
    create_time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Servable:
    """What this server can serve: adapters of these base models up to this rank."""

    base_models: tuple[str, ...]
    max_lora_rank: int


class Directory:
    """Resolves references. Without a catalog (no store) every reference is unknown.

    Entries are right while the watch is live, because the watch removes what changes. While the
    store does not answer they keep resolving for `name_ttl_s` from when they were last known to
    be right. `layout_id` is set by whoever registers the layout, once the store accepted it.
    `on_repointed` hears the old and the new digest when a name in use here moves; `on_asked` how
    many seconds somebody waited for the store's answer.
    """

    def __init__(
        self,
        catalog: Catalog | None,
        servable: Servable,
        name_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout_id = ""
        self.revision = 0
        self.on_repointed: Callable[[str, str], None] = lambda old_digest, new_digest: None
        self.on_asked: Callable[[float], None] = lambda seconds: None
        self._catalog = catalog
        self._servable = servable
        self._name_ttl_s = name_ttl_s
        self._clock = clock
        self._cache = NameCache()
        self._owners = Owners()
        self._fetches: dict[Question, asyncio.Task[AdapterRecord | None]] = {}
        # Revisions of changes that answers under way may be too old to know of.
        self._changed_at: dict[str, int] = {}
        self._reset_at = 0
        self._is_watched = False
        self._right_from = 0
        self._heard_s = float("-inf")
        self._asked_in_vain_s = float("-inf")

    # --- resolving ------------------------------------------------------------------------------

    async def resolve(
        self, who: Principal, text: str, min_revision: int = 0, subject: str = "adapter"
    ) -> Binding:
        """What `text` points to for this caller, at `min_revision` or later.

        Raises InvalidRequest (not a reference), AdapterNotFound (also for what only others have),
        AdapterUnusable (with the reason) or StoreUnavailable.
        """
        ref = parse_ref(text, subject, who.home_tenant)
        question = Question.of(who, ref)
        record = self._known(question, min_revision) or await self._ask(question, min_revision)
        tenant = tenant_of(record.name)
        if record.revision >= self._reset_at:  # else what has changed since will not be told
            self._owners.note(record.digest, record.name)
        try:
            self._check_servable(record)
        except AdapterUnusable:
            # It may become usable without an event: in a store that compiles more, say.
            self._cache.remove_name(record.name)
            raise
        label = ref.digest or f"{record.name}@{record.version}"
        return Binding(label, tenant, record.digest, record.rank, record.create_time_s)

    def names_of(self, who: Principal, digest: str, limit: int | None = None) -> list[str]:
        """The names of the caller's tenants, with or without version, known to point to a digest,
        sorted; of more than `limit` those that have been known for longest."""
        refs = (ref for ref in self._cache.refs_of(digest) if not ref.endswith(digest))
        return sorted(islice((ref for ref in refs if who.is_for(tenant_of(ref))), limit))

    def is_owner(self, who: Principal, digest: str) -> bool:
        """Whether one of the caller's tenants has used a digest here and has it, or has had it
        until lately; or the caller is for all tenants."""
        return who.tenants is None or self._owners.has(who.tenants, digest, self._clock())

    async def owned(self, who: Principal, digests: Collection[str]) -> set[str]:
        """Those of which the caller is an owner. The store is asked about what has changed too
        long ago; while it does not answer, they are not the caller's."""
        tenants = who.tenants
        for digest in digests if tenants is not None else ():
            assert tenants is not None
            if not self._owners.is_over(tenants, digest, self._clock()):
                continue
            try:
                await self.resolve(who, digest)
            except AdapterNotFound:
                self._owners.forget(tenants, digest)
            except AdapterUnusable:
                pass  # it is theirs, whether it can be served or not
            except InferenceError:
                break
        return {digest for digest in digests if self.is_owner(who, digest)}

    @property
    def is_live(self) -> bool:
        """Whether the watch has spoken lately, so that entries are right."""
        return self._is_watched and self._clock() - self._heard_s < LIVE_SECONDS

    def _known(self, question: Question, min_revision: int) -> AdapterRecord | None:
        """An answer that is right at `min_revision`."""
        entry = self._cached(question, min_revision)
        return entry.record if entry is not None and self.is_live else None

    def _cached(self, question: Question, min_revision: int) -> CachedName | None:
        """An entry that is at `min_revision`, and right if nothing has changed since."""
        for key in question.keys:
            entry = self._cache.get(key)
            if entry is not None and self._reflects(entry) >= min_revision:
                return entry
        return None

    def _reflects(self, entry: CachedName) -> int:
        """The catalog revision up to which an entry is known to be right."""
        return max(entry.record.revision, self.revision)

    async def _ask(self, question: Question, min_revision: int) -> AdapterRecord:
        """The store's answer, or the last known one while the store does not answer."""
        stale, began_s = self._stale(question, min_revision), self._clock()
        if stale is not None and began_s - self._asked_in_vain_s < RETRY_SECONDS:
            return stale
        try:
            async with asyncio.timeout(None if stale is None else PATIENCE_SECONDS):
                record = await self._fetch(question, min_revision)
            self.on_asked(self._clock() - began_s)
            return record
        except TimeoutError:
            self._asked_in_vain_s = self._clock()
            error = StoreUnavailable("the adapter store does not answer")
        except StoreUnavailable as unavailable:
            error = unavailable
        stale = self._stale(question, min_revision)
        if stale is None:
            raise error
        return stale

    def _stale(self, question: Question, min_revision: int) -> AdapterRecord | None:
        entry = self._cached(question, min_revision)
        if entry is None:
            return None
        # Whatever the watch has not removed was right when it last spoke.
        age_s = self._clock() - max(entry.asked_s, self._heard_s)
        return entry.record if age_s < self._name_ttl_s else None

    async def _fetch(self, question: Question, min_revision: int) -> AdapterRecord:
        """Asked once at a time; again while the answer is older than required."""
        for delay_s in (0.0, 0.0, 0.05, 0.2, 0.5):
            if delay_s:
                await asyncio.sleep(delay_s)
            task = self._fetches.get(question) or self._begin_fetch(question)
            # A caller who gives up must not take the answer from the others.
            record = await asyncio.shield(task)
            if record is None:
                continue
            if record.revision >= max(min_revision, self._changed_at.get(record.name, 0)):
                return record
        raise StoreUnavailable(
            f"the store has not reached revision {max(min_revision, self.revision)}",
            subject="min_revision",
        )

    def _begin_fetch(self, question: Question) -> asyncio.Task[AdapterRecord | None]:
        def done(task: asyncio.Task[AdapterRecord | None]) -> None:
            del self._fetches[question]
            if not task.cancelled():
                task.exception()  # seen, even if every caller has left

        task = self._fetches[question] = asyncio.create_task(self._fetch_once(question))
        task.add_done_callback(done)
        return task

    async def _fetch_once(self, question: Question) -> AdapterRecord | None:
        """None: the answer came from a replica that is behind what the watch had told before."""
        if self._catalog is None:
            raise AdapterNotFound("this server has no adapter store", subject="adapter")
        asked_s, told_revision = self._clock(), self.revision
        try:
            record = await self._catalog.get_adapter(str(question.ref), question.tenants or ())
            key = question.key_of(record)
        except StoreUnavailable:
            self._asked_in_vain_s = self._clock()
            raise
        except InferenceError:
            for key in question.keys:
                self._cache.remove(key)
            raise
        if record.revision < told_revision:
            return None
        if record.revision >= max(self._reset_at, self._changed_at.get(record.name, 0)):
            self._cache.put(key, CachedName(record, asked_s))
        return record

    def is_servable(self, record: AdapterRecord) -> bool:
        """Whether requests for it are taken here."""
        try:
            self._check_servable(record)
        except AdapterUnusable:
            return False
        return True

    def _check_servable(self, record: AdapterRecord) -> None:
        """Raises AdapterUnusable. The store's verdict on our layout outweighs the base's name."""
        name, servable = f"{record.name}@{record.version}", self._servable
        verdict = record.verdicts.get(self.layout_id)
        if verdict is None and record.base_model not in servable.base_models:
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
                f"adapter {name} has rank {record.rank}, above this server's max_lora_rank "
                f"{servable.max_lora_rank}",
                subject="rank",
            )

    # --- what the watch says --------------------------------------------------------------------

    def begin(self, revision: int) -> None:
        """A watch starts behind `self.revision`, and the store has just said that the catalog is
        at `revision`: entries are right again once the events up to there have come."""
        self._right_from = revision
        self._is_watched = self.revision >= revision
        if self._is_watched:
            self._heard_s = self._clock()

    def apply(self, event: NameEvent) -> None:
        """Takes the watch's next event, in order."""
        self.revision = max(self.revision, event.revision)
        if self.revision >= self._right_from:
            self._is_watched = True
            self._heard_s = self._clock()
        if not self._fetches:
            self._changed_at.clear()
        if event.name:
            known = self._cache.get(event.name)
            if known is not None and event.digest and event.digest != known.record.digest:
                self.on_repointed(known.record.digest, event.digest)
            self._cache.remove_name(event.name)
            self._owners.doubt(event.name, self._clock())
            self._changed_at[event.name] = event.revision

    def lost(self) -> None:
        """The watch ended: what changes is no longer removed."""
        self._is_watched = False

    def reset(self, revision: int) -> None:
        """The next watch starts behind `revision`, and what changed before is not known."""
        self._cache.clear()
        self._owners.doubt_all(self._clock())
        self._changed_at.clear()
        self._reset_at = revision
        self.revision = revision
