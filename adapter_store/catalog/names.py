"""Names and their versions: every change of one, and every question about one."""

from __future__ import annotations

from collections.abc import Callable

from adapter_store.catalog.database import Database
from adapter_store.catalog.history import History
from adapter_store.catalog.tables import base_models, events, image_states, lookup, usage
from adapter_store.catalog.tables import name_changes as changes
from adapter_store.catalog.tables.base_models import KnownBaseModels
from adapter_store.catalog.tables.filters import (
    decode_page_token,
    decode_version_token,
    encode_page_token,
    encode_version_token,
    page_limit,
    parse_filter,
)
from adapter_store.catalog.tables.lookup import VersionsPage
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.catalog.times import Times
from adapter_store.core import AdapterRecord, EventKind, Pruned, Quota, Recorded, Tenants
from servicekit.errors import NotFound
from servicekit.refs import AdapterName, AdapterRef

_UNLIMITED = Quota()
PAGE_BYTES = 3 << 20
"""About the size of the largest page: callers accept messages of 4 MiB if they are not told
otherwise. One record may be larger."""


class Names:
    def __init__(self, database: Database, history: History, times: Times) -> None:
        self._database = database
        self._history = history
        self._times = times

    def register(
        self,
        new: NewVersion,
        if_current_digest: str = "",
        quota: Quota = _UNLIMITED,
        keep: int = 0,
    ) -> Recorded:
        """See changes.register and usage.check_quota."""
        with self._history.change() as (conn, made):
            content = new.digest, new.source_bytes
            usage.check_quota(conn, new.name, *content, quota, new.texts)
            done = changes.register(conn, new, if_current_digest, self._times.now(), keep)
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
        with self._history.change() as (conn, made):
            now = self._times.now()
            deleted_after = now - self._times.delete_grace
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
        with self._history.change() as (conn, made):
            digest, event = changes.remove(conn, name, version, self._times.now(), tenants)
            made.append(event)
            return digest, event.revision

    def prune(self, name: AdapterName, keep: int, tenants: Tenants = None) -> Pruned:
        """See changes.prune."""
        with self._history.change(is_large=True) as (conn, made):
            pruned, new_events = changes.prune(conn, name, keep, self._times.now(), tenants)
            made += new_events
            return pruned

    def set_pinned(
        self, ref: AdapterRef, pinned: bool, max_pinned_bytes: int, tenants: Tenants = None
    ) -> tuple[AdapterRecord, int]:
        """Pins or unpins a version. Raises NotFound, LimitExceeded."""
        with self._history.change() as (conn, made):
            record = lookup.find(conn, ref, tenants)
            event = changes.set_pinned(conn, record, pinned, self._times.now())
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
        deleted_after = self._times.deleted_after()
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
        page = _cut(self._times.shown(found), limit)
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
        deleted_after = self._times.deleted_after()
        with self._database.read() as conn:
            found = lookup.versions_page(conn, name, before, limit + 1, deleted_after, tenants)
            if not found and before is None:
                raise NotFound(f"no adapter {name}", subject=str(name))
            current = lookup.current_version(conn, name, tenants)
            revision = events.revision(conn)
        page = _cut(self._times.shown(found), limit)
        more = len(page) < len(found)
        token = encode_version_token(name, page[-1].version) if more else ""
        return VersionsPage(page, token, current, revision)

    def known_base_models(self, name: AdapterName) -> KnownBaseModels:
        """Returns the facts that decide for which base model an adapter of this name is."""
        with self._database.read() as conn:
            return base_models.known(conn, name, self._times.live_since(), self._times.now())

    def _shown(self, record: AdapterRecord) -> AdapterRecord:
        return self._times.shown([record])[0]


def _cut(records: list[AdapterRecord], limit: int) -> list[AdapterRecord]:
    """Returns the first records, at most `limit`, that a page has space for, and at least one."""
    num_bytes = 0
    for index, record in enumerate(records[:limit]):
        num_bytes += record.message_bytes
        if index and num_bytes > PAGE_BYTES:
            return records[:index]
    return records[:limit]
