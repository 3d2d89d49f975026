"""One of many replicas compiles, whatever happens to it; over a real S3 server process."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest

from adapter_store.blobs.s3_prefix import Bucket
from adapter_store.catalog.tables import work_leases as lease_rows
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.core import ImageKey
from adapter_store.errors import CatalogUnavailable
from adapter_store.garbage_collector import SharedCollector
from adapter_store.images.plan.plan import ImagePlan
from adapter_store.images.tiers import shared_tier
from adapter_store.images.tiers.disk_tier import DiskTier
from adapter_store.images.tiers.shared_tier import SharedTier
from servicekit.refs import AdapterName
from tests.adapter_store.shared_parts import LAYOUT_TTL, WAIT_SECONDS, SharedParts, die
from tests.support.wait import until

KEY = ImageKey("sha256:" + "a" * 64, "sha256:" + "b" * 64)
PLAN: ImagePlan = None  # it is for tiers that need to know what they look for


@pytest.fixture
def parts(s3_endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with ExitStack() as stack:
        yield SharedParts(s3_endpoint, tmp_path, stack)


def read(tier: SharedTier) -> bytes | None:
    stream = tier.find(KEY, PLAN)
    if stream is None:
        return None
    with closing(stream):
        buffer = bytearray(stream.size_bytes)
        position = 0
        while count := stream.readinto(memoryview(buffer)[position:]):
            position += count
        assert position == len(buffer)
        return bytes(buffer)


def test_an_image_is_published_once_and_found_by_others(parts, tmp_path):
    one, two = parts.tier(), parts.tier()
    path = tmp_path / "image"
    path.write_bytes(b"image" * 1000)
    assert read(one) is None
    one.publish(KEY, path)
    assert read(two) == path.read_bytes()
    (tmp_path / "late").write_bytes(b"late")
    two.publish(KEY, tmp_path / "late")
    assert read(one) == path.read_bytes()
    two.remove(KEY)
    two.remove(KEY)
    assert read(one) is None


def test_of_many_replicas_one_compiles(parts, tmp_path):
    compiled: list[int] = []
    found: list[bytes | None] = []

    def replica(number: int) -> None:
        tier = parts.tier()
        while (data := read(tier)) is None:
            claim = tier.claim(KEY, wait=True)
            if claim is None:
                continue
            compiled.append(number)
            path = tmp_path / f"image{number}"
            path.write_bytes(b"image")
            tier.publish(KEY, path)
            claim.release()
        found.append(data)

    threads = [threading.Thread(target=replica, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert len(compiled) == 1
    assert found == [b"image"] * 4


def test_claim_excludes_others_until_released(parts):
    one, two = parts.tier(), parts.tier()
    claim = one.claim(KEY, wait=False)
    assert claim is not None
    assert two.claim(KEY, wait=False) is None
    claim.release()
    again = two.claim(KEY, wait=False)
    assert again is not None


def test_claim_of_a_dead_replica_expires(parts, monkeypatch):
    leases, others = parts.leases(), parts.leases()
    assert parts.tier(leases).claim(KEY, wait=False) is not None
    two = parts.tier(others)
    assert two.claim(KEY, wait=False) is None
    is_held = others.is_held

    def die_first(key: str) -> bool:
        die(parts, leases)
        return is_held(key)

    monkeypatch.setattr(others, "is_held", die_first)
    assert two.claim(KEY, wait=True) is None  # it had been somebody's: look again first
    assert two.claim(KEY, wait=True) is not None


def test_unreleased_claim_expires_while_its_replica_lives(parts, monkeypatch):
    leases = parts.leases(lease_seconds=0.3)
    assert leases.acquire("another")  # is renewed all the time
    claim = parts.tier(leases).claim(KEY, wait=False)
    assert claim is not None

    def refuse(key: str, owner: str) -> None:
        raise CatalogUnavailable("gone")

    monkeypatch.setattr(parts.catalog.leases, "release", refuse)
    claim.release()
    two = parts.tier()
    until(lambda: two.claim(KEY, wait=True) is not None)


def test_waiting_for_a_claim_has_an_end(parts, monkeypatch):
    monkeypatch.setattr(shared_tier, "WAIT_SECONDS", 0.2)
    assert parts.tier().claim(KEY, wait=False) is not None
    assert parts.tier().claim(KEY, wait=True) is None


def test_a_lease_lasts_as_long_as_its_replica(parts):
    leases = parts.leases(lease_seconds=0.2)
    assert leases.acquire("key")
    renewed = threading.Event()
    renew = parts.catalog.leases.renew
    counted: list[None] = []

    def count(keys: list[str], owner: str, seconds: float) -> None:
        renew(keys, owner, seconds)
        counted.append(None)
        if len(counted) == 10:
            renewed.set()

    parts.catalog.leases.renew = count
    assert renewed.wait(WAIT_SECONDS)
    leases.close()
    with parts.catalog.database.read() as conn:
        assert conn.exec_driver_sql("SELECT owner FROM leases").scalar_one() == leases.owner


def test_a_bucket_that_does_not_answer_is_an_oserror(parts, tmp_path):
    (tmp_path / "image").write_bytes(b"x")
    tier = SharedTier(Bucket("s3://none/store", "http://127.0.0.1:1"), parts.leases())
    for call in (
        lambda: tier.find(KEY, PLAN),
        lambda: tier.claim(KEY, wait=False),
        lambda: tier.publish(KEY, tmp_path / "image"),
        lambda: tier.remove(KEY),
    ):
        with pytest.raises(OSError, match="shared store"):
            call()


def test_images_of_collected_digests_are_swept(parts, tmp_path):
    tier = parts.tier()
    (tmp_path / "image").write_bytes(b"x")
    tier.publish(KEY, tmp_path / "image")
    tier.sweep(lambda digests: set(), ())
    assert read(tier) == b"x"
    tier.sweep(parts.catalog.blobs.unknown, ())
    assert read(tier) is None


def test_images_for_unused_layouts_are_removed(parts, tmp_path):
    """One replica at a time looks after what is shared, each after its own disk."""
    (tmp_path / "image").write_bytes(b"x")
    replicas = []
    for name in ("one", "two"):
        leases, disk = parts.leases(), DiskTier(tmp_path / name / "images", 1 << 20)
        disk.prepare(KEY, 3).write_bytes(b"xyz")
        disk.add(KEY)
        tier, blobs = parts.tier(leases), parts.blobs(name, leases)
        grace = timedelta(minutes=10)
        collector = SharedCollector(parts.catalog, blobs, disk, grace, tier, leases)
        replicas.append((collector, disk, tier))
    parts.catalog.layouts.add(KEY[1], "base", "{}")
    version = NewVersion(AdapterName("default", "a"), KEY[0], "base", "", 1, (), 1)
    parts.catalog.names.register(version)
    for collector, disk, tier in replicas:
        tier.publish(KEY, tmp_path / "image")
        collector.collect()
        assert collector.drop_unused_layouts() == frozenset()
        assert (disk.counts.images, read(tier)) == (1, b"x")
    parts.now += LAYOUT_TTL + timedelta(seconds=1)
    collector, disk, tier = replicas[0]
    collector.collect()
    assert read(tier) is None
    for collector, disk, _ in replicas:
        assert collector.drop_unused_layouts() == {KEY[1]}
        assert disk.counts.images == 0
    # Again, after its servers were back for a while.
    parts.catalog.layouts.use(KEY[1])
    tier.publish(KEY, tmp_path / "image")
    replicas[0][0].collect()
    assert read(tier) == b"x"
    parts.now += LAYOUT_TTL + timedelta(seconds=1)
    replicas[0][0].collect()
    assert read(tier) is None


def test_images_of_earlier_compilers_are_swept(parts, tmp_path, monkeypatch):
    tier = parts.tier()
    (tmp_path / "image").write_bytes(b"x")
    for revision in (1, 2, 10):
        monkeypatch.setattr(shared_tier, "COMPILER_REVISION", revision)
        tier.publish(KEY, tmp_path / "image")
    monkeypatch.setattr(shared_tier, "COMPILER_REVISION", 2)
    tier.sweep(lambda digests: set(), ())
    assert [key.split("/")[1] for key in parts.keys("compiled")] == ["10", "2"]


def test_leases_of_owners_long_dead_leave_no_rows(parts, monkeypatch):
    catalog = parts.catalog
    for i in range(3):
        assert catalog.leases.acquire(f"image:{i}", "dead", 0)
    assert catalog.leases.acquire("image:alive", "other", 30)
    monkeypatch.setattr(lease_rows, "FORGET_MICROS", 0)
    assert catalog.leases.acquire("image:new", "other", 30)
    with catalog.database.read() as conn:
        keys = set(conn.exec_driver_sql("SELECT key FROM leases").scalars())
    assert keys == {"image:alive", "image:new"}
