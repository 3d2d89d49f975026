"""Images that are followed while they are made: from the compiler, the disk tier, a shared tier."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from adapter_store.build import Store
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.recently_verified import VerifiedCheckpoints
from adapter_store.core import ImageKey
from adapter_store.errors import CorruptData, Overloaded
from adapter_store.images import builder as builder_module
from adapter_store.images import pull as pull_module
from adapter_store.images import stored_source
from adapter_store.images.compile import compile_image
from adapter_store.images.pull import Pulls
from contract.images.header import ImageChunk, ImageHeader, ImageTrailer, LayerEnd
from servicekit.errors import ReaderStalled
from servicekit.shares import Shares
from tests.support.store.images import SECONDS, expected_bytes, read, register, scenario


def test_the_first_bytes_leave_before_the_last_part_is_made(
    start,
    make_adapter,
    make_layout,
    steps,
):
    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        stream = pulls.stream(key, 0, "")
        header = await anext(stream)
        assert isinstance(header, ImageHeader)
        chunk = await anext(stream)
        first = bytes(chunk.data)
        end = await anext(stream)
        assert isinstance(end, LayerEnd)
        assert end.end_offset < header.total_bytes
        assert store.images.memory_counts.used_bytes == header.total_bytes
        steps.go()
        rest, others = await read(stream)
        assert first + rest == expected_bytes(folder, make_layout())
        assert isinstance(others[-1], ImageTrailer)
        await store.images.wait_idle()

    scenario(start, make_adapter, make_layout, test)


def test_the_disk_is_not_waited_for(start, make_adapter, make_layout, monkeypatch):
    gate = threading.Event()
    write_image = builder_module.write_image

    def gated(path, image) -> None:
        assert gate.wait(SECONDS)
        write_image(path, image)

    monkeypatch.setattr(builder_module, "write_image", gated)

    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        for _ in range(2):
            data, others = await read(pulls.stream(key, 0, ""))
            assert data == expected_bytes(folder, make_layout())
            assert isinstance(others[-1], ImageTrailer)
        assert store.images.disk_counts.images == 0
        gate.set()
        await store.images.wait_idle()
        assert store.images.disk_counts.images == 1

    scenario(start, make_adapter, make_layout, test)


def test_sixteen_pulls_of_one_image_of_which_some_leave(
    start,
    make_adapter,
    make_layout,
    steps,
):
    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        reading = [asyncio.create_task(read(pulls.stream(key, 0, ""))) for _ in range(16)]
        await asyncio.to_thread(steps.reached.acquire)
        for task in reading[:5]:
            task.cancel()
        await asyncio.wait(reading[:5])
        steps.go()
        results = await asyncio.gather(*reading[5:])
        assert {data for data, _ in results} == {expected_bytes(folder, make_layout())}
        assert steps.made == [key[0]]
        assert pulls.num_active == 0
        await store.images.wait_idle()

    scenario(start, make_adapter, make_layout, test)


def test_job_continues_without_waiters(
    start,
    make_adapter,
    make_layout,
    steps,
):
    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        reading = asyncio.create_task(read(pulls.stream(key, 0, "")))
        await asyncio.to_thread(steps.reached.acquire)
        reading.cancel()
        await asyncio.wait([reading])
        steps.go()
        await store.images.wait_idle()
        assert (await read(pulls.stream(key, 0, "")))[0] == expected_bytes(folder, make_layout())
        assert steps.made == [key[0]]

    scenario(start, make_adapter, make_layout, test)


def test_late_error_ends_streams_without_trailer(
    start,
    make_adapter,
    make_layout,
    steps,
):
    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        streams = [pulls.stream(key, 0, "") for _ in range(3)]
        for stream in streams:
            assert isinstance(await anext(stream), ImageHeader)
        steps.failure = CorruptData("flipped", subject="x")
        steps.go(1)
        for stream in streams:
            with pytest.raises(CorruptData, match="register the adapter again"):
                await read(stream)
        await store.images.wait_idle()
        assert store.images.memory_counts.used_bytes == 0
        steps.failure = None
        steps.go()
        data, _ = await read(pulls.stream(key, 0, ""))
        assert data == expected_bytes(folder, make_layout())
        await store.images.wait_idle()

    scenario(start, make_adapter, make_layout, test)


@pytest.mark.parametrize("part", [0, 1, -1])
def test_a_part_damaged_on_disk_is_never_sent_and_pulls_go_on(
    start,
    make_adapter,
    make_layout,
    tmp_path,
    steps,
    part,
):
    steps.go()

    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        await read(pulls.stream(key, 0, ""))
        await store.images.wait_idle()
        store.images.drop_digests([key[0]])
        (path,) = (tmp_path / "data" / "images").glob("*/*.safetensors")
        parts = compile_image(open_checkpoint(folder), make_layout()).parts
        data = bytearray(path.read_bytes())
        data[len(data) - parts[-1].end + parts[part].start] ^= 1
        path.write_bytes(data)
        again, others = await read(pulls.stream(key, 0, ""))
        assert again == expected_bytes(folder, make_layout())
        assert isinstance(others[-1], ImageTrailer)
        assert [end.sha256 for end in others[1:-1]] == [p.sha256 for p in parts]
        assert len(steps.made) == 2
        await store.images.wait_idle()

    scenario(start, make_adapter, make_layout, test)


def test_pull_without_memory_gets_a_retry_time(
    start,
    make_adapter,
    make_layout,
    steps,
):
    steps.go()
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(2)]
    size = len(expected_bytes(folders[0], make_layout()))

    async def main() -> None:
        async with start(image_memory=size + size // 2) as store:
            store.images.memory_wait_seconds = 0.05
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digests = [
                (await register(store, folder, f"n{i}")).digest for i, folder in enumerate(folders)
            ]
            await store.precompiler.wait_idle()
            async with store.images.hold(ImageKey(digests[0], layout_id)) as held:
                await held.wait_complete()
                await store.images.wait_idle()
                with pytest.raises(Overloaded) as caught:
                    async with store.images.hold(ImageKey(digests[1], layout_id)):
                        pass
                assert caught.value.retry_after_s > 0
            async with store.images.hold(ImageKey(digests[1], layout_id)) as image:
                await image.wait_complete()
            await store.images.wait_idle()
            store.images.check_integrity()

    asyncio.run(main())


def test_compile_after_registration_does_not_hash_again(
    start,
    make_adapter,
    make_layout,
    monkeypatch,
):
    opened = []
    open_again = stored_source.open_checkpoint
    monkeypatch.setattr(
        stored_source, "open_checkpoint", lambda *a, **k: opened.append(a) or open_again(*a, **k)
    )

    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        await read(pulls.stream(key, 0, ""))
        await store.images.wait_idle()
        assert opened == []

    scenario(start, make_adapter, make_layout, test)


def test_verified_checkpoints_are_trusted_while_fresh_and_unchanged(make_adapter):
    folder = make_adapter()
    checkpoint = open_checkpoint(folder)
    verified = VerifiedCheckpoints()
    assert verified.find(checkpoint.digest, folder) is None
    verified.put(checkpoint)
    assert verified.find(checkpoint.digest, folder) is checkpoint
    assert verified.find(checkpoint.digest, folder / "elsewhere") is None
    verified.put(checkpoint)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert verified.find(checkpoint.digest, folder) is None
    late = VerifiedCheckpoints(trusted_seconds=0)
    late.put(open_checkpoint(folder))
    assert late.find(checkpoint.digest, folder) is None


@pytest.mark.parametrize("share", [0.001, 1.0])
def test_what_is_larger_than_a_share_is_read_fast(
    start, make_adapter, make_layout, monkeypatch, share
):
    """Else one pull that is read as slowly as any may be would hold the memory for hours."""
    monkeypatch.setattr(pull_module, "LARGE_PULL_SECONDS", 0.05)
    others = Shares("pulled_bytes", 1 << 20, share)

    async def test(store: Store, pulls: Pulls, key, folder) -> None:
        async def read_slowly() -> int:
            num_bytes = 0
            async with aclosing(pulls.stream(key, 0, "", frozenset(["default"]), "a")) as stream:
                async for message in stream:
                    num_bytes += len(getattr(message, "data", b""))
                    await asyncio.sleep(0.1 * isinstance(message, ImageChunk))
            return num_bytes

        whole = expected_bytes(folder, make_layout())
        assert (await read(pulls.stream(key, 0, "", None, "a")))[0] == whole
        if share == 1:
            assert await read_slowly() == len(whole)
        else:
            with pytest.raises(ReaderStalled, match="larger than this tenant's share"):
                await read_slowly()
        assert others.used == 0

    scenario(start, make_adapter, make_layout, test, others)
