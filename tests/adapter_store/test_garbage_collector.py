from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

from adapter_store.blobs.local import LocalBlobs
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.core import ImageKey, ImageState, LayoutVerdict
from adapter_store.garbage_collector import Collector
from adapter_store.images.tiers.disk_tier import DiskTier
from servicekit.errors import FailedPrecondition, NotFound
from servicekit.refs import AdapterName, AdapterRef

GRACE = timedelta(seconds=60)
TTL = timedelta(days=7)
A = AdapterName("default", "a")
ONE, TWO = ("sha256:" + digit * 64 for digit in "12")
LAYOUT = "sha256:" + "f" * 64


class Parts:
    """Catalog, blobs and disk tier of one folder, on a clock that tests turn."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.catalog = Catalog(
            folder / "catalog.sqlite3",
            event_retention=100,
            layout_ttl=TTL,
            clock=lambda: self.now,
        )
        self.catalog.layouts.add(LAYOUT, "base", "{}")
        self.blobs = LocalBlobs(folder)
        self.disk = DiskTier(folder / "images", 1 << 20)
        self.collector = Collector(self.catalog, self.blobs, self.disk, GRACE)

    def keep(self, digest: str) -> None:
        staged = self.blobs.stage()
        (staged / "file").write_bytes(b"x")
        self.blobs.put(staged, digest)
        path = self.disk.prepare(ImageKey(digest, LAYOUT), 3)
        path.write_bytes(b"xyz")
        self.disk.add(ImageKey(digest, LAYOUT))

    def register(self, name: AdapterName, digest: str) -> None:
        self.catalog.names.register(NewVersion(name, digest, "base", "", 1, (), 1))

    def exists(self, digest: str) -> tuple[bool, bool]:
        return self.blobs.path(digest).exists(), self.disk.path(ImageKey(digest, LAYOUT)).exists()


@pytest.fixture
def parts(catalog_file):
    parts = Parts(catalog_file.parent)
    yield parts
    parts.catalog.close()


def test_unreferenced_blobs_are_removed_after_the_grace(parts):
    for digest in (ONE, TWO):
        parts.keep(digest)
        parts.register(A, digest)
    parts.catalog.names.remove(A, 1)
    parts.now += GRACE - timedelta(seconds=1)
    assert parts.collector.collect() == []
    parts.now += timedelta(seconds=1)
    assert parts.collector.collect() == [ONE]
    assert parts.exists(ONE) == (False, False)
    assert parts.exists(TWO) == (True, True)
    assert parts.disk.counts.images == 1
    assert parts.collector.collect() == []


def test_what_a_crash_in_between_left_is_swept(parts):
    parts.keep(ONE)
    parts.keep(TWO)
    parts.register(A, ONE)
    parts.collector.sweep()
    assert parts.exists(ONE) == (True, True)
    assert parts.exists(TWO) == (False, False)


def test_digest_registered_again_during_collection(parts):
    """The registration holds the guard from keeping the blob until its commit."""
    parts.keep(ONE)
    parts.register(A, ONE)
    parts.catalog.names.remove(A)
    parts.now += GRACE
    with parts.blobs.guard(ONE):
        collecting = threading.Thread(target=parts.collector.collect)
        collecting.start()
        collecting.join(0.2)
        assert collecting.is_alive()
        parts.register(AdapterName("default", "b"), ONE)
    collecting.join()
    assert parts.exists(ONE) == (True, True)
    assert parts.catalog.names.get(AdapterRef(digest=ONE))[0].version == 1


def test_images_for_an_unused_layout_are_removed(parts):
    parts.keep(ONE)
    parts.register(A, ONE)
    parts.now += TTL
    parts.collector.collect()
    assert parts.collector.drop_unused_layouts() == frozenset()
    assert parts.exists(ONE) == (True, True)
    parts.now += timedelta(seconds=1)
    parts.catalog.images.set_verdict(ONE, LayoutVerdict(LAYOUT, ImageState.READY))
    assert parts.collector.collect() == []
    assert parts.collector.drop_unused_layouts() == {LAYOUT}
    assert parts.exists(ONE) == (True, False)
    assert parts.disk.counts.images == 0
    [verdict] = parts.catalog.names.get(AdapterRef(A))[0].verdicts
    assert verdict.state is ImageState.PENDING


def test_at_start_images_for_unused_layouts_go(parts):
    parts.keep(ONE)
    parts.register(A, ONE)
    parts.now += 2 * TTL
    parts.collector.sweep()
    assert parts.exists(ONE) == (True, False)


def test_images_of_forgotten_layouts_are_removed(parts):
    parts.keep(ONE)
    parts.now += 5 * TTL
    parts.collector.collect()
    assert parts.catalog.layouts.ids() == []
    assert parts.exists(ONE) == (True, True)
    assert parts.collector.drop_unused_layouts() == {LAYOUT}
    assert parts.exists(ONE) == (True, False)
    assert parts.collector.drop_unused_layouts() == frozenset()


# --- ephemeral versions, and those with a time to live --------------------------------------------

EPHEMERAL_GRACE = timedelta(seconds=10)


def push(parts: Parts, digest: str, ttl_s: int = 0, keep: int = 0, name: AdapterName = A) -> int:
    """Registers content in memory; returns its revision."""
    stored = parts.blobs.put(MemoryFolder([MemoryFile("file")]), digest)
    new = NewVersion(
        *(name, digest, "base", "", 1, (), 1),
        blob=stored,
        ephemeral=True,
        ttl=timedelta(seconds=ttl_s),
    )
    return parts.catalog.names.register(new, keep=keep).revision


def test_deleted_ephemeral_content_goes_after_its_own_grace(parts):
    push(parts, ONE)
    push(parts, TWO, keep=1)
    parts.now += EPHEMERAL_GRACE - timedelta(seconds=1)
    assert parts.collector.collect_due() == []
    assert parts.blobs.in_memory == [ONE, TWO]
    parts.now += timedelta(seconds=1)
    assert parts.collector.collect_due() == [ONE]
    assert parts.blobs.in_memory == [TWO]
    assert parts.catalog.blobs.digests() == {TWO}
    assert parts.collector.collect_due() == []


def test_a_version_ends_with_its_time_to_live(parts):
    parts.keep(ONE)
    parts.register(A, ONE)
    push(parts, TWO, ttl_s=30)
    parts.now += timedelta(seconds=29)
    assert parts.collector.collect_due() == []
    assert parts.catalog.names.get(AdapterRef(A))[0].digest == TWO
    revision = parts.catalog.history.revision()
    parts.now += timedelta(seconds=1)
    assert parts.collector.collect_due() == []  # within the grace
    assert parts.catalog.names.get(AdapterRef(A))[0].digest == ONE
    (event,) = parts.catalog.history.since(revision, 10)
    assert (event.version, event.digest) == (1, ONE)
    parts.now += EPHEMERAL_GRACE
    assert parts.collector.collect_due() == [TWO]


def test_each_registration_prolongs_the_time_to_live(parts):
    push(parts, ONE, ttl_s=30)
    parts.now += timedelta(seconds=20)
    push(parts, ONE, ttl_s=30)
    parts.now += timedelta(seconds=20)
    parts.collector.collect_due()
    assert parts.catalog.names.get(AdapterRef(A))[0].version == 1
    parts.now += timedelta(seconds=10)
    parts.collector.collect_due()
    with pytest.raises(NotFound):
        parts.catalog.names.get(AdapterRef(A))


def test_what_is_pinned_does_not_expire(parts):
    push(parts, ONE, ttl_s=30)
    parts.catalog.names.set_pinned(AdapterRef(A), True, 1 << 30)
    parts.now += timedelta(hours=1)
    assert parts.collector.collect_due() == []
    parts.catalog.names.set_pinned(AdapterRef(A), False, 1 << 30)
    parts.collector.collect_due()
    with pytest.raises(NotFound):
        parts.catalog.names.get(AdapterRef(A))


def test_content_in_memory_that_was_not_recorded_is_let_go(parts):
    parts.blobs.put(MemoryFolder([MemoryFile("file")]), ONE)
    parts.collector.collect()
    assert parts.blobs.in_memory == []


def test_after_a_restart_ephemeral_versions_are_gone_and_no_revision_comes_twice(parts):
    parts.keep(ONE)
    parts.register(A, ONE)
    given = [push(parts, TWO)]
    parts.blobs = LocalBlobs(parts.folder)  # a new process has an empty memory
    parts.collector = Collector(parts.catalog, parts.blobs, parts.disk, GRACE)
    parts.collector.sweep()
    assert parts.catalog.names.get(AdapterRef(A))[0].version == 1
    assert parts.catalog.blobs.digests() == {ONE}
    given.append(push(parts, TWO))
    assert given[1] > given[0] + 1
    assert parts.catalog.names.get(AdapterRef(A))[0].version == 3


def test_what_a_rollback_restores_stays_though_its_time_to_live_had_ended(parts):
    push(parts, ONE, ttl_s=30)
    parts.now += timedelta(seconds=20)
    push(parts, TWO)
    parts.now += timedelta(seconds=10)
    parts.collector.collect_due()
    assert parts.catalog.names.rollback(A, 1)[0].expire_time is None
    parts.now += timedelta(hours=1)
    parts.collector.collect_due()
    assert parts.catalog.names.get(AdapterRef(A))[0].version == 1


def test_an_ephemeral_version_does_not_take_the_pin(parts):
    parts.keep(ONE)
    parts.register(A, ONE)
    parts.catalog.names.set_pinned(AdapterRef(A), True, 1 << 30)
    revision = parts.catalog.history.revision()
    with pytest.raises(FailedPrecondition, match="unpin default/a@1 first") as caught:
        push(parts, TWO)
    assert (caught.value.subject, caught.value.reason) == ("ephemeral", "NAME_PINNED")
    assert parts.catalog.history.revision() == revision
    record, _ = parts.catalog.names.get(AdapterRef(A))
    assert (record.digest, record.pinned) == (ONE, True)
    parts.catalog.names.set_pinned(AdapterRef(A), False, 1 << 30)
    push(parts, TWO)
    assert not parts.catalog.names.get(AdapterRef(A))[0].pinned


def test_room_is_made_of_one_tenants_own_or_of_all(parts):
    for tenant, digest in (("one", ONE), ("two", TWO)):
        name = AdapterName(tenant, "a")
        push(parts, digest, name=name)
        parts.catalog.names.remove(name)
    assert parts.collector.make_room("one") == [ONE]
    assert parts.blobs.in_memory == [TWO]
    assert parts.collector.make_room("one") == []
    assert parts.collector.make_room(None) == [TWO]
