from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

from adapter_store.blobs.local import LocalBlobs
from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.rows import NewVersion
from adapter_store.core import ImageKey, ImageState, LayoutVerdict
from adapter_store.garbage_collector import Collector
from adapter_store.images.disk_tier import DiskTier
from servicekit.refs import AdapterName, AdapterRef

GRACE = timedelta(seconds=60)
TTL = timedelta(days=7)
A = AdapterName("default", "a")
ONE, TWO = ("sha256:" + digit * 64 for digit in "12")
LAYOUT = "sha256:" + "f" * 64


class Parts:
    """Catalog, blobs and disk tier of one folder, on a clock that tests turn."""

    def __init__(self, folder) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.catalog = Catalog(
            folder / "catalog.sqlite3",
            event_retention=100,
            layout_ttl=TTL,
            clock=lambda: self.now,
        )
        self.catalog.add_layout(LAYOUT, "base", "{}")
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
        self.catalog.register(NewVersion(name, digest, "base", "", 1, (), 1))

    def exists(self, digest: str) -> tuple[bool, bool]:
        return self.blobs.path(digest).exists(), self.disk.path(ImageKey(digest, LAYOUT)).exists()


@pytest.fixture
def parts(tmp_path):
    parts = Parts(tmp_path)
    yield parts
    parts.catalog.close()


def test_unreferenced_blobs_are_removed_after_the_grace(parts):
    for digest in (ONE, TWO):
        parts.keep(digest)
        parts.register(A, digest)
    parts.catalog.remove(A, 1)
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
    parts.catalog.remove(A)
    parts.now += GRACE
    with parts.blobs.guard(ONE):
        collecting = threading.Thread(target=parts.collector.collect)
        collecting.start()
        collecting.join(0.2)
        assert collecting.is_alive()
        parts.register(AdapterName("default", "b"), ONE)
    collecting.join()
    assert parts.exists(ONE) == (True, True)
    assert parts.catalog.get(AdapterRef(digest=ONE))[0].version == 1


def test_images_for_an_unused_layout_are_removed(parts):
    parts.keep(ONE)
    parts.register(A, ONE)
    parts.now += TTL
    parts.collector.collect()
    assert parts.collector.drop_unused_layouts() == frozenset()
    assert parts.exists(ONE) == (True, True)
    parts.now += timedelta(seconds=1)
    parts.catalog.set_verdict(ONE, LayoutVerdict(LAYOUT, ImageState.READY))
    assert parts.collector.collect() == []
    assert parts.collector.drop_unused_layouts() == {LAYOUT}
    assert parts.exists(ONE) == (True, False)
    assert parts.disk.counts.images == 0
    [verdict] = parts.catalog.get(AdapterRef(A))[0].verdicts
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
    assert parts.catalog.layout_ids() == []
    assert parts.exists(ONE) == (True, True)
    assert parts.collector.drop_unused_layouts() == {LAYOUT}
    assert parts.exists(ONE) == (True, False)
    assert parts.collector.drop_unused_layouts() == frozenset()
