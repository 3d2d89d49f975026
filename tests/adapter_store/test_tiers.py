from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.tiers import DiskTier, MemoryEntry, MemoryTier


def key(name: str) -> tuple[str, str]:
    return f"sha256:{name}", "sha256:layout"


def entry(name: str, num_bytes: int) -> MemoryEntry:
    """The tier asks an image for nothing but its size."""
    return MemoryEntry(key(name), SimpleNamespace(plan=SimpleNamespace(total_bytes=num_bytes)))


def memory(capacity: int = 100, pinned: tuple[str, ...] = ()) -> MemoryTier:
    return MemoryTier(capacity, lambda k: k in {key(name) for name in pinned})


def test_the_least_recently_used_goes_first():
    tier = memory()
    for name in "abc":
        tier.put(entry(name, 30))
    assert tier.find(key("a")) is not None
    tier.put(entry("d", 30))
    assert [name for name in "abcd" if key(name) in tier] == ["a", "c", "d"]
    assert (tier.counts.used_bytes, tier.counts.images, tier.counts.evictions) == (90, 3, 1)
    assert tier.find(key("b")) is None
    assert (tier.counts.hits, tier.counts.misses) == (1, 1)


def test_pinned_images_never_leave():
    tier = memory(pinned=("a", "b"))
    for name in "abcd":
        tier.put(entry(name, 40))
    assert [name for name in "abcd" if key(name) in tier] == ["a", "b", "d"]
    assert tier.counts.used_bytes == 120
    tier.put(entry("e", 10))
    assert [name for name in "abcde" if key(name) in tier] == ["a", "b", "e"]


def test_what_is_held_stays_and_is_accounted():
    tier = memory()
    a = entry("a", 80)
    tier.put(a)
    with tier.hold(a):
        tier.put(entry("b", 80))
        assert key("a") in tier
        assert tier.counts.used_bytes == 160
    assert (key("a") in tier, key("b") in tier) == (False, True)
    assert tier.counts.used_bytes == 80
    tier.check_integrity()


def test_what_is_dropped_while_held_takes_its_bytes_until_released():
    tier = memory()
    a = entry("a", 80)
    tier.put(a)
    with tier.hold(a), tier.hold(a):
        tier.drop_digest("sha256:a")
        assert key("a") not in tier
        assert tier.counts.used_bytes == 80
    assert tier.counts.used_bytes == 0
    with tier.hold(a):
        assert (tier.counts.used_bytes, tier.counts.images) == (80, 1)
    assert tier.counts.used_bytes == 0
    tier.check_integrity()


def test_an_image_larger_than_the_tier_stays_only_as_long_as_it_is_held():
    tier = memory()
    big = entry("big", 500)
    tier.put(big)
    with tier.hold(big):
        assert tier.counts.used_bytes == 500
    assert (tier.counts.used_bytes, tier.counts.images) == (0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "hold", "release", "drop", "find"]),
            st.sampled_from("abcdef"),
            st.integers(1, 60),
        ),
        max_size=60,
    )
)
def test_accounts_are_exact_whatever_happens(steps):
    tier = memory(pinned=("f",))
    held = []
    newest: dict[str, MemoryEntry] = {}
    for step, name, size in steps:
        if step == "put":
            newest[name] = entry(name, size)
            tier.put(newest[name])
        elif step == "hold" and name in newest:
            hold = tier.hold(newest[name])
            hold.__enter__()
            held.append(hold)
        elif step == "release" and held:
            held.pop(0).__exit__(None, None, None)
        elif step == "drop":
            tier.drop(key(name))
        else:
            tier.find(key(name))
    for hold in held:
        hold.__exit__(None, None, None)
    tier.check_integrity()
    pinned = newest["f"].num_bytes if key("f") in tier else 0
    last = max((e.num_bytes for e in newest.values()), default=0)
    assert tier.counts.used_bytes <= max(100, pinned + last)


def write(tier: DiskTier, name: str, num_bytes: int) -> bool:
    path = tier.prepare(key(name), num_bytes)
    if path is None:
        return False
    path.write_bytes(b"x" * num_bytes)
    tier.add(key(name))
    return True


def test_disk_keeps_within_its_capacity(tmp_path):
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
    assert not tier.has_room(11)
    assert tier.has_room(10)


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


@pytest.mark.parametrize("left", [".a.safetensors.1.tmp", "gone.safetensors.sha256", "notes.txt"])
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
    tier.clear()
    assert (tier.counts.used_bytes, tier.counts.images) == (0, 0)
