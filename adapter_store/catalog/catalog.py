"""The Catalog: the transactions around the package's modules.

A method that takes `tenants` sees only their adapters, and others' as if they did not exist; with
None it sees all. All methods block and may be called from any thread. A method's result is durable.
Writers run one after the other; listeners are called in commit order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, insert, select, update

from adapter_store.catalog import (
    announcements,
    base_models,
    changes,
    events,
    image_states,
    layouts,
    leftovers,
    lookup,
    rows,
    schema,
    usage,
    work_leases,
)
from adapter_store.catalog.base_models import KnownBaseModels
from adapter_store.catalog.database import ENDLESS, Place, PostgresDatabase, Space, open_database
from adapter_store.catalog.filters import (
    decode_page_token,
    decode_version_token,
    encode_page_token,
    encode_version_token,
    page_limit,
    parse_filter,
)
from adapter_store.catalog.follower import Follower, notify
from adapter_store.catalog.image_states import ImageAccess
from adapter_store.catalog.layouts import LayoutLimits
from adapter_store.catalog.leftovers import BlobKey
from adapter_store.catalog.lookup import VersionsPage
from adapter_store.catalog.migrations import migrate
from adapter_store.catalog.rows import NewVersion
from adapter_store.catalog.usage import CatalogCounts
from adapter_store.core import (
    AdapterEvent,
    AdapterRecord,
    Announcement,
    BlobPlace,
    EventKind,
    ImageContent,
    ImageKey,
    LayoutInfo,
    LayoutVerdict,
    Pruned,
    Quota,
    Recorded,
    Tenants,
)
from servicekit.errors import NotFound
from servicekit.refs import AdapterName, AdapterRef

_TRIM_EVERY = 64
_UNLIMITED = Quota()
NO_LAYOUT_LIMITS = LayoutLimits()
PAGE_BYTES = 3 << 20
"""About the size of the largest page: callers accept messages of 4 MiB if they are not told
otherwise. One record may be larger."""
PAGE_LAYOUTS = 64
DEFAULT_GRACE = timedelta(minutes=10)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Catalog:
    """Opens, or creates, the catalog at `place`, a file or the address of a PostgreSQL database.

    At least `event_retention` events are kept. Deleted versions can be restored for `delete_grace`.
    A layout unused for longer than `layout_ttl` is not live; with 0 all are. Of live ones there are
    no more than `layout_limits`. A file lies in `space`.
    """

    def __init__(
        self,
        place: Place,
        *,
        event_retention: int,
        delete_grace: timedelta = DEFAULT_GRACE,
        layout_ttl: timedelta = timedelta(0),
        layout_limits: LayoutLimits = NO_LAYOUT_LIMITS,
        space: Space = ENDLESS,
        clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._event_retention = event_retention
        self._delete_grace = delete_grace
        self._layout_ttl = layout_ttl
        self._layout_limits = layout_limits
        self._clock = clock
        self._layout_uses: dict[str, datetime] = {}
        self._renewals: dict[str, datetime] = {}
        self._listeners: list[Callable[[list[AdapterEvent]], None]] = []
        self._notifying = threading.Lock()
        self._database = open_database(place, space)
        self._database.check()
        migrate(self._database)
        with self._database.write() as conn:
            image_states.forget_compiling(conn)
        self._follower: Follower | None = None
        if isinstance(self._database, PostgresDatabase):
            self._follower = Follower(self._database, self.revision(), self._notify)

    @property
    def is_shared(self) -> bool:
        """Whether other replicas may change it too."""
        return self._follower is not None

    @property
    def is_current(self) -> bool:
        """Whether the listeners were called for all commits except the ones of the last seconds. If
        not, the database does not answer, and other replicas may have changed it."""
        return self._follower is None or self._follower.is_current

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
        self._database.close()

    def on_change(self, listener: Callable[[list[AdapterEvent]], None]) -> None:
        """Calls `listener` with the events of each commit, in commit order, from some thread; in a
        shared catalog also of other replicas' commits, a moment later."""
        self._listeners.append(listener)

    # Names

    def register(
        self,
        new: NewVersion,
        if_current_digest: str = "",
        quota: Quota = _UNLIMITED,
        keep: int = 0,
    ) -> Recorded:
        """See changes.register and usage.check_quota."""
        with self._change() as (conn, made):
            content = new.digest, new.source_bytes
            usage.check_quota(conn, new.name, *content, quota, new.texts)
            done = changes.register(conn, new, if_current_digest, self._clock(), keep)
            made += done.events
            record = self._shown(lookup.find(conn, AdapterRef(name=new.name)))
            return Recorded(record, done.revision, tuple(done.deleted_versions))

    def rollback(
        self,
        name: AdapterName,
        version: int,
        if_current_digest: str = "",
        tenants: Tenants = None,
        quota: Quota = _UNLIMITED,
        accept: Callable[[AdapterRecord], None] = lambda record: None,
    ) -> Recorded:
        """See changes.rollback. Raises also QuotaExceeded if a deleted name would exceed the quota
        by coming back, and errors of `accept` about the record that would be current."""
        with self._change() as (conn, made):
            now = self._clock()
            deleted_after = now - self._delete_grace
            new_events, revision = changes.rollback(
                conn, name, version, if_current_digest, deleted_after, now, tenants
            )
            if any(event.kind is EventKind.REGISTERED for event in new_events):
                usage.check_num_adapters(conn, name.tenant, 0, quota)
            record = lookup.find(conn, AdapterRef(name=name))
            accept(record)
            made += new_events
            return Recorded(self._shown(record), revision)

    def check_capacity(self, name: AdapterName, expected_digest: str, quota: Quota) -> None:
        """See usage.check_capacity."""
        with self._database.read() as conn:
            usage.check_capacity(conn, name, expected_digest, quota)

    def remove(
        self, name: AdapterName, version: int = 0, tenants: Tenants = None
    ) -> tuple[str, int]:
        """Returns the digest, and the revision at which it is deleted; see changes.remove."""
        with self._change() as (conn, made):
            digest, event = changes.remove(conn, name, version, self._clock(), tenants)
            made.append(event)
            return digest, event.revision

    def prune(self, name: AdapterName, keep: int, tenants: Tenants = None) -> Pruned:
        """See changes.prune."""
        with self._change(is_large=True) as (conn, made):
            pruned, new_events = changes.prune(conn, name, keep, self._clock(), tenants)
            made += new_events
            return pruned

    def set_pinned(
        self, ref: AdapterRef, pinned: bool, max_pinned_bytes: int, tenants: Tenants = None
    ) -> tuple[AdapterRecord, int]:
        """Pins or unpins a version. Raises NotFound, LimitExceeded."""
        with self._change() as (conn, made):
            record = lookup.find(conn, ref, tenants)
            event = changes.set_pinned(conn, record, pinned, self._clock())
            if event is not None:
                made.append(event)
            if pinned:
                image_states.check_pinned_bytes(conn, max_pinned_bytes)
            found = AdapterRef(record.name, record.version)
            return self._shown(lookup.find(conn, found)), events.revision(conn)

    def get(self, ref: AdapterRef, tenants: Tenants = None) -> tuple[AdapterRecord, int]:
        """Returns the record and the revision it reflects. Raises NotFound."""
        with self._database.read() as conn:
            return self._shown(lookup.find(conn, ref, tenants)), events.revision(conn)

    def text(self, digest: str, tenants: Tenants = None) -> bytes:
        """Returns a tokenizer's extract or a chat template. Raises NotFound."""
        deleted_after = self._clock() - self._delete_grace
        with self._database.read() as conn:
            found = lookup.text(conn, digest, deleted_after, tenants)
        if found is None:
            raise NotFound(f"no tokenizer or chat template {digest}", subject="digest")
        return found

    def page(
        self,
        page_size: int = 0,
        page_token: str = "",
        filter_text: str = "",
        tenants: Tenants = None,
    ) -> tuple[list[AdapterRecord], str, int]:
        """Returns a page, the token of the next one ("" for the last), and the revision that the
        page reflects."""
        terms = parse_filter(filter_text)
        after = decode_page_token(page_token, filter_text)
        limit = page_limit(page_size)
        with self._database.read() as conn:
            found = lookup.page(conn, terms, after, limit + 1, tenants)
            revision = events.revision(conn)
        page = _cut(self._all_shown(found), limit)
        more = len(page) < len(found)
        token = encode_page_token(page[-1].name, filter_text) if more else ""
        return page, token, revision

    def versions(
        self, name: AdapterName, page_size: int = 0, page_token: str = "", tenants: Tenants = None
    ) -> VersionsPage:
        """Returns a name's versions, newest first, with the ones that can be restored. Raises
        NotFound."""
        before = decode_version_token(page_token, name)
        limit = page_limit(page_size)
        deleted_after = self._clock() - self._delete_grace
        with self._database.read() as conn:
            found = lookup.versions_page(conn, name, before, limit + 1, deleted_after, tenants)
            if not found and before is None:
                raise NotFound(f"no adapter {name}", subject=str(name))
            current = lookup.current_version(conn, name, tenants)
            revision = events.revision(conn)
        page = _cut(self._all_shown(found), limit)
        more = len(page) < len(found)
        token = encode_version_token(name, page[-1].version) if more else ""
        return VersionsPage(page, token, current, revision)

    def pinned_keys(self) -> list[ImageKey]:
        """Returns every image of every pinned version, for live layouts."""
        with self._database.read() as conn:
            return image_states.pinned_keys(conn, self._live_since())

    # History

    def revision(self) -> int:
        with self._database.read() as conn:
            return events.revision(conn)

    def events_since(self, revision: int, limit: int) -> list[AdapterEvent]:
        """Raises RevisionTooOld."""
        with self._database.read() as conn:
            return events.since(conn, revision, limit)

    # Layouts and images

    def known_base_models(self, name: AdapterName) -> KnownBaseModels:
        """Returns the facts that decide for which base model an adapter of this name is."""
        with self._database.read() as conn:
            return base_models.known(conn, name, self._live_since(), self._clock())

    def add_layout(self, layout_id: str, base_model: str, body: str, account: str = "") -> bool:
        """See layouts.add. Raises DiskFull, too, for a new one."""
        if not self.layout_bases(layout_id):
            self._database.check_space(len(body))
        now, ttl, limits = self._clock(), self._layout_ttl, self._layout_limits
        with self._database.write() as conn:
            return layouts.add(
                conn, layout_id, base_model, body, now, ttl, account=account, limits=limits
            )

    def announce(
        self, layout_id: str, announcement_id: str, announcement: Announcement, account: str = ""
    ) -> bool:
        """See announcements.add."""
        now, share = self._clock(), self._layout_limits.share
        with self._database.write() as conn:
            is_first = announcements.add(
                *(conn, layout_id, announcement_id, announcement, now),
                account=account,
                share=share,
            )
        self._renewals[announcement_id] = now
        return is_first

    def is_renewal_due(self, announcement_id: str) -> bool:
        """Returns whether an announcement has to be renewed. Does not block."""
        last = self.last_renewal(announcement_id)
        return last is None or self._clock() - last >= announcements.RENEW_AFTER

    def last_renewal(self, announcement_id: str) -> datetime | None:
        """Returns when this replica last renewed an announcement."""
        return self._renewals.get(announcement_id)

    def renew(self, announcement_id: str) -> str | None:
        """See announcements.renew."""
        now = self._clock()
        with self._database.write() as conn:
            layout_id = announcements.renew(conn, announcement_id, now)
        if layout_id is not None:
            self._renewals[announcement_id] = now
        return layout_id

    def withdraw(self, announcement_id: str, last_renewal: datetime) -> None:
        """Counts the servers of an announcement as gone, unless it was renewed after this one's
        `last_renewal`; in a shared catalog once other replicas would have renewed it."""
        now = self._clock()
        stays_for = announcements.REPLICA_RENEWS_WITHIN if self.is_shared else timedelta(0)
        with self._database.write() as conn:
            is_withdrawn = announcements.withdraw(
                conn, announcement_id, last_renewal, now, stays_for
            )
        if is_withdrawn:
            self._renewals.pop(announcement_id, None)  # a server that comes back renews it at once

    def expire_announcements(self) -> int:
        """See announcements.expire."""
        now = self._clock()
        with self._database.write() as conn:
            num_ended = announcements.expire(conn, now)
        old = [key for key, last in self._renewals.items() if now - last > lookup.LASTS_FOR]
        for key in old:
            self._renewals.pop(key, None)
        return num_ended

    def is_use_due(self, layout_id: str) -> bool:
        """Returns whether a use has to be recorded again. Does not block."""
        last = self._layout_uses.get(layout_id)
        return last is None or self._clock() - last >= layouts.precision(self._layout_ttl)

    def use_layout(self, layout_id: str) -> bool:
        """See layouts.use."""
        now = self._clock()
        with self._database.write() as conn:
            is_back = layouts.use(conn, layout_id, now, self._layout_ttl, self._layout_limits)
        self._layout_uses[layout_id] = now
        return is_back

    def layout_body(self, layout_id: str) -> str | None:
        with self._database.read() as conn:
            return layouts.body(conn, layout_id)

    def layout_bases(self, layout_id: str) -> list[str]:
        """Returns the names of a layout's base model, none for an unknown one."""
        with self._database.read() as conn:
            return layouts.bases(conn, layout_id)

    def served_layouts(self) -> list[str]:
        """Returns the live layouts with a server, or whose last one has gone less than an hour
        ago."""
        has_server = announcements.has_server(self._clock())
        with self._database.read() as conn:
            return layouts.live(conn, self._live_since(), has_server)

    def unused_layouts(self) -> frozenset[str]:
        with self._database.read() as conn:
            return layouts.unused(conn, self._live_since())

    def forget_unused_images(self) -> int:
        """See layouts.forget_unused_images."""
        since = self._live_since()
        return self._in_batches(lambda conn: layouts.forget_unused_images(conn, since))

    def forget_unused_layouts(self) -> list[str]:
        """Forgets layouts that were not used for FORGET_AFTER_TTLS. See layouts.forget_unused."""
        now, num_ttls = self._clock(), layouts.FORGET_AFTER_TTLS
        before = layouts.live_since(now, self._layout_ttl, num_ttls)
        with self._database.write() as conn:
            gone = layouts.forget_unused(conn, before, self._layout_limits.max_in_all)
        for layout_id in gone:
            self._layout_uses.pop(layout_id, None)
        return gone

    def layout_page(self, after: str = "") -> tuple[list[LayoutInfo], str]:
        """Returns a page of layouts, from the first after the one with this id, and the id that the
        next page is after ("" for the last)."""
        with self._database.read() as conn:
            page = layouts.page(conn, after, PAGE_LAYOUTS + 1, self._clock(), self._live_since())
        more = len(page) > PAGE_LAYOUTS
        return page[:PAGE_LAYOUTS], page[PAGE_LAYOUTS - 1].layout_id if more else ""

    def forget_layout(self, layout_id: str) -> int:
        """See layouts.forget."""
        with self._database.write() as conn:
            num_images = layouts.forget(conn, layout_id)
        self._layout_uses.pop(layout_id, None)
        self._renewals.clear()  # so that its servers notice with the next events of their watches
        return num_images

    def layout_ids(self) -> list[str]:
        with self._database.read() as conn:
            return list(conn.scalars(select(schema.layouts.c.layout_id)))

    def set_verdict(self, digest: str, verdict: LayoutVerdict) -> bool:
        with self._database.write() as conn:
            return image_states.set_verdict(conn, digest, verdict, self._clock())

    def set_fits(self, key: ImageKey, build_micros: int, content: ImageContent) -> None:
        """See image_states.set_fits."""
        with self._database.write() as conn:
            image_states.set_fits(conn, key, build_micros, content, self._clock())

    def unfinished(self, layout_id: str, after_digest: str, limit: int) -> list[str]:
        """Returns the digests to precompile under this layout, in order, after `after_digest`."""
        with self._database.read() as conn:
            return image_states.unfinished(conn, layout_id, after_digest, limit)

    def image_access(self, key: ImageKey, grace: timedelta, tenants: Tenants = None) -> ImageAccess:
        """Returns the facts that decide whether these tenants may pull an image, from one
        snapshot."""
        now = self._clock()
        with self._database.read() as conn:
            return image_states.image_access(conn, key, now - grace, tenants, now)

    def adopt_compiler(self, compiler: str) -> bool:
        """Forgets every verdict that another compiler gave. Returns whether there was another."""
        key = schema.meta.c.key == "compiler"
        with self._database.write() as conn:
            if conn.scalar(select(schema.meta.c.value).where(key)) == compiler:
                return False
            image_states.forget_all(conn)
            if conn.execute(update(schema.meta).where(key).values(value=compiler)).rowcount == 0:
                conn.execute(insert(schema.meta).values(key="compiler", value=compiler))
            return True

    # Blobs

    def blob_digests(self) -> set[str]:
        with self._database.read() as conn:
            return set(conn.scalars(select(schema.blobs.c.digest)))

    def expire_versions(self, grace: timedelta) -> int:
        """See leftovers.expire_versions."""
        before = self._clock() - grace
        return self._in_batches(lambda conn: leftovers.expire_versions(conn, before))

    def is_due(self, ephemeral_grace: timedelta) -> bool:
        """See leftovers.is_due."""
        now = self._clock()
        with self._database.read() as conn:
            return leftovers.is_due(conn, now, now - ephemeral_grace)

    def expire(self) -> int:
        """See changes.expire; returns how many names have lost versions."""
        with self._change() as (conn, made):
            made += changes.expire(conn, self._clock())
            return len(made)

    def expire_ephemeral(self, grace: timedelta, tenant: str | None = None) -> int:
        """See leftovers.expire_ephemeral."""
        before = self._clock() - grace
        return self._in_batches(lambda conn: leftovers.expire_ephemeral(conn, before, tenant))

    def forget_memory(self) -> int:
        """See changes.forget_memory; returns how many names have lost versions."""
        with self._database.read() as conn:
            if not rows.has_memory(conn):
                return 0
        with self._change(is_large=True) as (conn, made):
            made += changes.forget_memory(conn, self._clock())
            return len(made)

    def forget_texts(self) -> int:
        """See leftovers.forget_texts."""
        return self._in_batches(leftovers.forget_texts)

    def unreferenced_blobs(self, limit: int) -> list[str]:
        with self._database.read() as conn:
            return leftovers.unreferenced(conn, limit)

    def take_blob(self, digest: str) -> str | None:
        """See leftovers.take_blob."""
        with self._database.write() as conn:
            return leftovers.take_blob(conn, digest)

    def blob(self, digest: str) -> BlobPlace | None:
        """Returns where a blob is stored, or None if there is none."""
        with self._database.read() as conn:
            return rows.find_blob(conn, digest)

    def orphans(self, leases_by_place: Mapping[BlobKey, str]) -> set[BlobKey]:
        """See leftovers.orphans."""
        with self._database.write() as conn:
            return leftovers.orphans(conn, leases_by_place)

    def unknown_digests(self, digests: Sequence[str]) -> set[str]:
        """Returns the digests that no blob has."""
        with self._database.read() as conn:
            return leftovers.unknown(conn, digests)

    # Leases

    def acquire_lease(self, key: str, owner: str, seconds: float) -> bool:
        with self._database.write() as conn:
            return work_leases.acquire(conn, key, owner, seconds)

    def is_leased(self, key: str) -> bool:
        with self._database.read() as conn:
            return work_leases.is_held(conn, key)

    def renew_leases(self, keys: Sequence[str], owner: str, seconds: float) -> None:
        with self._database.write() as conn:
            work_leases.renew(conn, keys, owner, seconds)

    def release_lease(self, key: str, owner: str) -> None:
        with self._database.write() as conn:
            work_leases.release(conn, key, owner)

    def counts(self) -> CatalogCounts:
        with self._database.read() as conn:
            return usage.counts(conn, self._live_since())

    def _shown(self, record: AdapterRecord) -> AdapterRecord:
        return self._all_shown([record])[0]

    def _all_shown(self, records: Sequence[AdapterRecord]) -> list[AdapterRecord]:
        """See lookup.shown."""
        now = lookup.to_micros(self._clock())
        live_since = self._live_since()
        return [lookup.shown(record, now, live_since) for record in records]

    def _live_since(self) -> int:
        return layouts.live_since(self._clock(), self._layout_ttl)

    # Transactions

    def _in_batches(self, forget: Callable[[Connection], int]) -> int:
        """Repeats a change, in a transaction each, until it finds nothing; returns how much it has
        found. One transaction for all could take more than a full volume has left."""
        num_found, found = 0, 1
        while found:
            with self._database.write(is_large=num_found > 0) as conn:
                found = forget(conn)
            num_found += found
        return num_found

    @contextmanager
    def _change(self, *, is_large: bool = False) -> Iterator[tuple[Connection, list[AdapterEvent]]]:
        """Opens a write transaction. The listeners are called with the events put into its list,
        once it is committed."""
        made: list[AdapterEvent] = []
        with self._notifying:
            with self._database.write(is_large=is_large) as conn:
                yield conn, made
                self._trim_history(conn, made)
                if made and self._follower is not None:
                    notify(conn)
            if made and self._follower is None:
                self._notify(made)

    def _notify(self, events: list[AdapterEvent]) -> None:
        for listener in self._listeners:
            listener(events)

    def _trim_history(self, conn: Connection, made: Sequence[AdapterEvent]) -> None:
        if any(event.revision % _TRIM_EVERY == 0 for event in made):
            events.forget_before(conn, made[-1].revision - self._event_retention + 1)


def _cut(records: list[AdapterRecord], limit: int) -> list[AdapterRecord]:
    """Returns the first records, at most `limit`, that a page has space for, and at least one."""
    num_bytes = 0
    for index, record in enumerate(records[:limit]):
        num_bytes += record.message_bytes
        if index and num_bytes > PAGE_BYTES:
            return records[:index]
    return records[:limit]
