from __future__ import annotations

import os
import time

import pytest

from adapter_store.core import ImageKey
from adapter_store.images.tiers.disk_tier import VERIFIED_SECONDS, DiskTier, Removal
from adapter_store.images.tiers.file import sha256_path


def key(name: str) -> ImageKey:
    return ImageKey(f"sha256:{name}", "sha256:layout")


def write(tier: DiskTier, name: str, num_bytes: int) -> bool:
    path = tier.prepare(key(name), num_bytes)
    if path is None:
        return False
    path.write_bytes(b"x" * num_bytes)
    sha256_path(path).touch()
    tier.add(key(name))
    return True


def test_disk_stays_within_its_capacity(tmp_path):
    tier = DiskTier(tmp_path / "images", 100)
    for name in "abc":
        assert write(tier, name, 30)
    assert tier.find(key("a")) == tier.path(key("a"))
    assert write(tier, "d", 30)
    assert not tier.path(key("b")).exists()
    assert tier.find(key("b")) is None
    assert (tier.counts.used_bytes, tier.counts.images, tier.counts.evictions) == (90, 3, 1)
    assert not write(tier, "big", 101)
    assert tier.counts.images == 3
    assert not tier.has_space(11)
    assert tier.has_space(10)


def test_disk_is_found_again_in_order_of_use(tmp_path):
    tier = DiskTier(tmp_path / "images", 100)
    for i, name in enumerate("abc"):
        write(tier, name, 30)
        os.utime(tier.path(key(name)), (i, i))
    tier.find(key("a"))
    again = DiskTier(tmp_path / "images", 100)
    assert (again.counts.used_bytes, again.counts.images) == (90, 3)
    write(again, "d", 30)
    assert again.cached() == [key(name) for name in "cad"]


def test_disk_that_became_smaller_is_emptied_to_fit(tmp_path):
    tier = DiskTier(tmp_path / "images", 100)
    for i, name in enumerate("abc"):
        write(tier, name, 30)
        os.utime(tier.path(key(name)), (i, i))
    again = DiskTier(tmp_path / "images", 65)
    assert again.cached() == [key("b"), key("c")]


@pytest.mark.parametrize(
    "left", ["lone.safetensors", ".a.safetensors.1.tmp", "gone.safetensors.sha256", "notes.txt"]
)
def test_what_a_crash_left_is_removed(tmp_path, left):
    tier = DiskTier(tmp_path / "images", 100)
    write(tier, "a", 10)
    folder = tier.path(key("a")).parent
    (folder / "a.safetensors.sha256").write_bytes(b"12345")
    (folder / left).write_bytes(b"x")
    again = DiskTier(tmp_path / "images", 100)
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.safetensors",
        "a.safetensors.sha256",
    ]
    assert again.counts.used_bytes == 15


def test_a_file_removed_by_hand_is_a_miss(tmp_path):
    tier = DiskTier(tmp_path / "images", 100)
    write(tier, "a", 10)
    tier.path(key("a")).unlink()
    assert tier.find(key("a")) is None
    write(tier, "a", 10)
    assert tier.counts.used_bytes == 10
    num_before = tier.counts.images
    tier.clear()
    assert (tier.counts.used_bytes, tier.counts.images) == (0, 0)
    assert tier.counts.removals[Removal.UNUSED] == num_before > 0
    tier.remove(key("never there"), Removal.DAMAGED)
    assert tier.counts.removals[Removal.DAMAGED] == 0


def test_a_checked_file_counts_as_checked_until_it_is_touched(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1000)
    write(tier, "a", 100)
    path = tier.find(key("a"))
    with open(path, "rb") as file:
        assert not tier.is_verified(key("a"), file.fileno())
        tier.set_verified(key("a"), file.fileno())
    tier.find(key("a"))  # being used is not being touched
    with open(path, "rb") as file:
        assert tier.is_verified(key("a"), file.fileno())
        now = time.monotonic()
        monkeypatch.setattr(
            "adapter_store.images.tiers.disk_tier.time.monotonic", lambda: now + VERIFIED_SECONDS
        )
        assert not tier.is_verified(key("a"), file.fileno())
        monkeypatch.undo()
    path.write_bytes(b"x" * 100)
    with open(path, "rb") as file:
        assert not tier.is_verified(key("a"), file.fileno())
    tier.remove(key("a"), Removal.DAMAGED)
    write(tier, "a", 100)
    with open(path, "rb") as file:
        assert not tier.is_verified(key("a"), file.fileno())
