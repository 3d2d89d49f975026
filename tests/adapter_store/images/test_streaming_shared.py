"""Images that replicas share: followed while they arrive, compiled once, and never waited for in
vain."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from adapter_store.build import Store
from adapter_store.core import ImageKey
from adapter_store.images import builder as builder_module
from adapter_store.images.builder import ImageBuilder
from adapter_store.images.pull import Pulls
from adapter_store.images.tiers.file import open_image
from servicekit.shares import Shares
from tests.support.store.images import SECONDS, expected_bytes, read, register, scenario


class FolderShared:
    """A shared tier in a folder, as replicas on one machine would have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.claimed: set = set()
        self.calls: list[str] = []

    def path(self, key) -> Path:
        return self.folder / key.digest[7:]

    def find(self, key, plan):
        self.calls.append("find")
        return open_image(self.path(key)) if self.path(key).exists() else None

    def claim(self, key, *, wait: bool):
        self.calls.append("claim")
        if key in self.claimed:
            return None
        self.claimed.add(key)
        shared = self

        class Claim:
            def release(self) -> None:
                shared.claimed.remove(key)

        return Claim()

    def publish(self, key, path: Path) -> None:
        self.calls.append("publish")
        self.path(key).write_bytes(path.read_bytes())

    def remove(self, key) -> None:
        self.calls.append("remove")
        self.path(key).unlink()


@pytest.fixture
def share(tmp_path, monkeypatch):
    """share(): from now on stores have this shared tier."""
    (tmp_path / "shared").mkdir()
    shared = FolderShared(tmp_path / "shared")
    init = ImageBuilder.__init__

    def with_shared(self, *args, **options) -> None:
        init(self, *args, **options)
        self._shared = shared

    monkeypatch.setattr(ImageBuilder, "__init__", with_shared)
    return shared


def test_of_two_replicas_one_compiles_and_the_other_fetches(
    start,
    make_adapter,
    make_layout,
    share,
    steps,
    tmp_path,
):
    steps.go()

    async def first(store: Store, pulls: Pulls, key, folder) -> None:
        await read(pulls.stream(key, 0, ""))
        await store.images.wait_idle()

    scenario(start, make_adapter, make_layout, first)
    assert share.calls == ["find", "claim", "publish"]
    assert not share.claimed

    async def main() -> None:
        folder = tmp_path / "adapter"
        async with start(data_dir=tmp_path / "data2") as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digest = (await register(store, folder)).digest
            await store.precompiler.wait_idle()
            pulls = Pulls(
                *(store.images, store.metrics, store.use_cases.layout_usage.record),
                Shares("pulled_bytes", 1 << 30),
            )
            data, _ = await read(pulls.stream(ImageKey(digest, layout_id), 0, ""))
            assert data == expected_bytes(folder, make_layout())
            await store.images.wait_idle()
            assert store.images.disk_counts.images == 1
            # Damaged there: taken away, compiled here, published again.
            store.images.drop_digests([digest])
            (path,) = (tmp_path / "data2" / "images").glob("*/*.safetensors")
            path.unlink()
            shared_file = share.path(ImageKey(digest, layout_id))
            damaged = bytearray(shared_file.read_bytes())
            damaged[-1] ^= 1
            shared_file.write_bytes(damaged)
            data, _ = await read(pulls.stream(ImageKey(digest, layout_id), 0, ""))
            assert data == expected_bytes(folder, make_layout())
            await store.images.wait_idle()
            assert share.calls[-4:] == ["find", "remove", "claim", "publish"]

    asyncio.run(main())
    assert len(steps.made) == 2


def test_a_shared_tier_that_does_not_answer_fails_nothing(
    start,
    make_adapter,
    make_layout,
    share,
    monkeypatch,
):
    def down(*args, **options):
        raise OSError("no route")

    for method in ("find", "claim", "publish"):
        monkeypatch.setattr(share, method, down)

    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        data, _ = await read(pulls.stream(key, 0, ""))
        assert data == expected_bytes(folder, make_layout())
        await store.images.wait_idle()

    scenario(start, make_adapter, make_layout, test)


def test_pull_waits_limited_time_for_another_claim(
    start, make_adapter, make_layout, share, steps, monkeypatch
):
    """Two replicas whose precompilations yield to pulls would otherwise wait for each other."""
    steps.go()
    monkeypatch.setattr(builder_module, "CLAIM_WAIT_SECONDS", 0.1)

    async def pull(store: Store, pulls: Pulls, key, folder) -> None:
        share.claimed.add(key)  # by another replica, which does not come to it
        data, _ = await read(pulls.stream(key, 0, ""))
        assert data
        await store.images.wait_idle()
        assert share.path(key).exists()
        assert share.claimed == {key}

    scenario(start, make_adapter, make_layout, pull)


def test_collected_while_compiled_leaves_no_image(start, make_adapter, make_layout, share, steps):
    async def collected(store: Store, pulls: Pulls, key, folder) -> None:
        reading = asyncio.create_task(read(pulls.stream(key, 0, "")))
        assert await asyncio.to_thread(steps.reached.acquire, timeout=SECONDS)
        record = store.catalog.names.page()[0][0]
        store.catalog.names.remove(record.name)
        store.catalog.expiry.expire_deleted(timedelta(0))
        assert store.catalog.blobs.take(key[0]) is not None
        steps.go()
        data, _ = await reading
        assert data
        await store.images.wait_idle()
        assert store.images.disk_counts.images == 0
        assert not share.path(key).exists()

    scenario(start, make_adapter, make_layout, collected)
