"""Images for pulls: each made once, from the nearest tier, and never unverified."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest
import torch

from adapter_store.build import Store
from adapter_store.catalog.layouts import Layouts
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.core import ANYONE, Announcement, ImageKey, ImageState
from adapter_store.errors import CorruptData, IncompatibleAdapter
from adapter_store.images import builder as builder_module
from adapter_store.images import precompile
from adapter_store.images.compile import compile_image
from adapter_store.images.plan import layout as layout_module
from adapter_store.images.tiers import cache as images_module
from adapter_store.images.tiers.buffers import Buffer, BufferPool, resident_buffer
from adapter_store.images.worker_pool import Priority
from contract.images.dtypes import DataType
from servicekit.errors import FailedPrecondition, NotFound
from servicekit.refs import AdapterName, AdapterRef
from tests.support.store.images import register
from tests.support.wait import TIMEOUT_S, until_async


@pytest.fixture
def compiles(monkeypatch):
    """The digests that were compiled, in order; `gate` holds compiling up while it is cleared."""
    made: list[str] = []
    gate = threading.Event()
    gate.set()
    compile_parts = builder_module.compile_parts

    def counted(checkpoint, plan, buffer, **options):
        made.append(checkpoint.digest)
        assert gate.wait(TIMEOUT_S)
        return compile_parts(checkpoint, plan, buffer, **options)

    monkeypatch.setattr(builder_module, "compile_parts", counted)
    made_and_gate = type("Compiles", (), {"made": made, "gate": gate})
    yield made_and_gate
    gate.set()


async def pulled_bytes(store: Store, key) -> bytes:
    async with store.images.hold(key) as image:
        return bytes((await image.wait_complete()).buffer.numpy().data)


def state(store: Store, name: str = "a") -> ImageState:
    record, _ = store.catalog.names.get(AdapterRef(AdapterName("default", name)))
    return record.verdicts[0].state


def test_image_is_built_once_for_all_callers(start, make_adapter, make_layout, compiles):
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            digest = (await register(store, folder)).digest
            compiles.gate.clear()
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            pulls = [
                asyncio.create_task(pulled_bytes(store, ImageKey(digest, layout_id)))
                for _ in range(8)
            ]
            await asyncio.sleep(0.05)
            pulls[0].cancel()
            compiles.gate.set()
            results = await asyncio.gather(*pulls, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError)
            expected = compile_image(open_checkpoint(folder), make_layout())
            assert set(results[1:]) == {bytes(expected.buffer.numpy().data)}
            assert compiles.made == [digest]
            await store.precompiler.wait_idle()
            store.images.check_integrity()

    asyncio.run(main())


def test_the_next_image_finds_its_memory_ready(start, make_adapter, make_layout, monkeypatch):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(2)]
    spares: list[Buffer] = []

    def noted(pool: BufferPool, num_bytes: int) -> Buffer:
        spares.append(resident_buffer(pool, num_bytes))
        return spares[-1]

    monkeypatch.setattr(images_module, "resident_buffer", noted)

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            first = (await register(store, folders[0], "first")).digest
            await pulled_bytes(store, ImageKey(first, layout_id))
            await store.precompiler.wait_idle()
            second = (await register(store, folders[1], "second")).digest
            async with store.images.hold(ImageKey(second, layout_id)) as image:
                assert image.memory is spares[0]
                expected = compile_image(open_checkpoint(folders[1]), make_layout())
                assert torch.equal((await image.wait_complete()).buffer, expected.buffer)

    asyncio.run(main())


def test_an_image_is_built_again_while_a_buffer_is_made_ready(
    start, make_adapter, make_layout, monkeypatch
):
    """It was deleted meanwhile, and registered again."""
    folder = make_adapter()
    may_end = threading.Event()
    began = threading.Event()

    def slow(pool: BufferPool, num_bytes: int) -> Buffer:
        began.set()
        assert may_end.wait(60)
        return resident_buffer(pool, num_bytes)

    monkeypatch.setattr(images_module, "resident_buffer", slow)

    async def main() -> None:
        async with start(compile_workers=3) as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digest = (await register(store, folder)).digest
            key = ImageKey(digest, layout_id)
            first = await pulled_bytes(store, key)
            assert await asyncio.to_thread(began.wait, 60)
            store.images.drop_digests([digest])
            try:
                assert await pulled_bytes(store, key) == first
            finally:
                may_end.set()
            await store.precompiler.wait_idle()

    asyncio.run(main())


def test_from_memory_then_disk_then_blob(start, make_adapter, make_layout, compiles):
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            digest = (await register(store, folder)).digest
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            await store.precompiler.wait_idle()
            first = await pulled_bytes(store, ImageKey(digest, layout_id))
            assert store.images.memory_counts.hits == 1
            assert state(store) is ImageState.READY
        async with start() as store:
            assert await pulled_bytes(store, ImageKey(digest, layout_id)) == first
            assert (store.images.memory_counts.misses, store.images.disk_counts.hits) == (1, 1)
        async with start(disk_cache_bytes=1) as store:
            assert await pulled_bytes(store, ImageKey(digest, layout_id)) == first
            assert (store.images.disk_counts.misses, store.images.disk_counts.images) == (1, 0)
        assert compiles.made == [digest, digest]

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "header", "gone"])
def test_damaged_disk_file_is_rebuilt(start, make_adapter, make_layout, tmp_path, damage):
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            digest = (await register(store, folder)).digest
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            await store.precompiler.wait_idle()
            good = await pulled_bytes(store, ImageKey(digest, layout_id))
        (path,) = (tmp_path / "data" / "images").glob("*/*.safetensors")
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        else:
            at = 20 if damage == "header" else len(data) - 5
            data[at] ^= 0x40
            path.write_bytes({"cut": data[:-1], "emptied": b""}.get(damage, data))
        async with start() as store:
            assert await pulled_bytes(store, ImageKey(digest, layout_id)) == good
            assert store.images.disk_counts.misses == 1
        async with start() as store:
            assert await pulled_bytes(store, ImageKey(digest, layout_id)) == good
            assert store.images.disk_counts.hits == 1

    asyncio.run(main())


def test_a_damaged_blob_is_data_loss_until_registered_again(
    start, make_adapter, make_layout, tmp_path
):
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            record = await register(store, folder)
            weights = tmp_path / "data" / "blobs" / record.digest[7:] / "adapter_model.safetensors"
            good = weights.read_bytes()
            weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            await store.precompiler.wait_idle()
            key = ImageKey(record.digest, layout_id)
            with pytest.raises(CorruptData, match="register the adapter again"):
                await pulled_bytes(store, key)
            assert state(store) is ImageState.PENDING
            weights.write_bytes(good[:50])
            with pytest.raises(CorruptData):
                await pulled_bytes(store, key)
            await register(store, folder)
            expected = compile_image(open_checkpoint(folder), make_layout())
            assert await pulled_bytes(store, key) == bytes(expected.buffer.numpy().data)

    asyncio.run(main())


def test_incompatible_is_a_verdict_with_a_reason(start, make_adapter, make_layout, compiles):
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight" for x in "AB"]
    shapes = [(4, 16), (99, 4)]
    tensors = {n: torch.ones(s) for n, s in zip(names, shapes, strict=True)}
    folder = make_adapter(("q_proj",), tensors=tensors)

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digest = (await register(store, folder)).digest
            await store.precompiler.wait_idle()
            assert state(store) is ImageState.INCOMPATIBLE
        async with start() as store:  # the verdict is kept
            with pytest.raises(IncompatibleAdapter, match=r"q_proj\.lora_B\.weight: shape"):
                await pulled_bytes(store, ImageKey(digest, layout_id))
            assert compiles.made == []

    asyncio.run(main())


def test_cast_overflow_is_incompatible_with_one_dtype(start, make_adapter, make_layout):
    folder = make_adapter(lora_alpha=1e7)

    async def main() -> None:
        async with start() as store:
            digest = (await register(store, folder)).digest
            ids = [
                (await store.use_cases.layouts.register(make_layout(dtype), [1]))[0]
                for dtype in (DataType.FLOAT16, DataType.FLOAT32)
            ]
            with pytest.raises(IncompatibleAdapter, match="not finite"):
                await pulled_bytes(store, ImageKey(digest, ids[0]))
            assert await pulled_bytes(store, ImageKey(digest, ids[1]))

    asyncio.run(main())


def test_what_is_not_registered_is_not_pulled(start, make_adapter, make_layout):
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            with pytest.raises(NotFound, match="no adapter sha256:11"):
                await pulled_bytes(store, ImageKey("sha256:" + "11" * 32, layout_id))
            digest = (await register(store, folder, base_model="org/other")).digest
            with pytest.raises(NotFound, match="no layout sha256:00"):
                await pulled_bytes(store, ImageKey(digest, "sha256:" + "00" * 32))
            with pytest.raises(IncompatibleAdapter, match="not registered for") as caught:
                await pulled_bytes(store, ImageKey(digest, layout_id))
            assert caught.value.reason == "WRONG_BASE"
            announcement = Announcement(("tiny",))
            await store.use_cases.layouts.register(make_layout(), [1], announcement=announcement)
            await register(store, folder, "b", base_model="tiny")
            assert await pulled_bytes(store, ImageKey(digest, layout_id))

    asyncio.run(main())


def test_aliases_and_limits_compile_nothing(start, make_adapter, make_layout, compiles):
    """A layout has the id that it had when aliases were part of it, and none were given."""
    folder = make_adapter()

    async def main() -> None:
        async with start() as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            assert layout_id == (
                "sha256:4b6b58a697e117cfd181920b4f8f640a6a8e6bc4c2e1f9fe9feb25d09123385f"
            )
            await register(store, folder)
            await store.precompiler.wait_idle()
            for announcement in (Announcement(("tiny",), 8), Announcement(("small",), 16)):
                again = await store.use_cases.layouts.register(
                    make_layout(), [1], announcement=announcement
                )
                assert again[:2] == (layout_id, 1)
            digest = (await register(store, folder, "b", base_model="small")).digest
            await store.precompiler.wait_idle()
            assert await pulled_bytes(store, ImageKey(digest, layout_id))
            assert compiles.made == [digest]

    asyncio.run(main())


def test_pulls_go_before_precompilation(start, make_adapter, make_layout, compiles):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(4)]

    async def main() -> None:
        async with start() as store:
            digests = [
                (await register(store, folder, f"n{i}")).digest for i, folder in enumerate(folders)
            ]
            compiles.gate.clear()
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            await until_async(lambda: compiles.made)
            wanted = [d for d in sorted(digests) if d != compiles.made[0]][-1]
            pull = asyncio.create_task(pulled_bytes(store, ImageKey(wanted, layout_id)))
            await until_async(lambda: store.images._workers._most_urgent is Priority.PULL)
            compiles.gate.set()
            await pull
            await store.precompiler.wait_idle()
            assert compiles.made[1] == wanted
            assert sorted(compiles.made) == sorted(digests)
            assert {state(store, f"n{i}") for i in range(4)} == {ImageState.READY}

    asyncio.run(main())


def test_precompilation_fills_free_disk_space_only(start, make_adapter, make_layout, compiles):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(4)]
    size = compile_image(open_checkpoint(folders[0]), make_layout()).plan.total_bytes

    async def main() -> None:
        async with start(disk_cache_bytes=2 * (size + 5000)) as store:
            digests = [
                (await register(store, folder, f"n{i}")).digest for i, folder in enumerate(folders)
            ]
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            await store.precompiler.wait_idle()
            states = [state(store, f"n{i}") for i in range(4)]
            assert (states.count(ImageState.READY), states.count(ImageState.PENDING)) == (2, 2)
            assert store.images.disk_counts.evictions == 0
            for digest in digests:
                await pulled_bytes(store, ImageKey(digest, layout_id))
            await store.images.wait_idle()
            assert store.images.disk_counts.evictions == 2

    asyncio.run(main())


def test_pinned_images_are_in_memory_and_stay(start, make_adapter, make_layout):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(4)]
    size = compile_image(open_checkpoint(folders[0]), make_layout()).plan.total_bytes

    async def main() -> None:
        async with start(image_memory=2 * size) as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digests = [
                (await register(store, folder, f"n{i}", pinned=i == 0)).digest
                for i, folder in enumerate(folders)
            ]
            await store.precompiler.wait_idle()
            for digest in digests:
                await pulled_bytes(store, ImageKey(digest, layout_id))
            hits = store.images.memory_counts.hits
            await pulled_bytes(store, ImageKey(digests[0], layout_id))
            assert store.images.memory_counts.hits == hits + 1
            await store.images.wait_idle()
            store.images.check_integrity()
        async with start(image_memory=2 * size) as store:  # warm again after a restart
            await store.precompiler.wait_idle()
            await pulled_bytes(store, ImageKey(digests[0], layout_id))
            assert store.images.memory_counts.hits == 1
            await store.use_cases.editing.set_pinned(
                ANYONE, AdapterRef(AdapterName("default", "n0")), False
            )
            for digest in digests[1:]:
                await pulled_bytes(store, ImageKey(digest, layout_id))
            misses = store.images.memory_counts.misses
            await pulled_bytes(store, ImageKey(digests[0], layout_id))
            assert store.images.memory_counts.misses == misses + 1

    asyncio.run(main())


def test_memory_is_bounded_while_many_are_pulled(start, make_adapter, make_layout):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(6)]
    size = compile_image(open_checkpoint(folders[0]), make_layout()).plan.total_bytes

    async def main() -> None:
        async with start(image_memory=2 * size) as store:
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            digests = [
                (await register(store, folder, f"n{i}")).digest for i, folder in enumerate(folders)
            ]
            await store.precompiler.wait_idle()
            for _ in range(3):
                await asyncio.gather(
                    *(pulled_bytes(store, ImageKey(d, layout_id)) for d in digests)
                )
                assert store.images.memory_counts.used_bytes <= 2 * size
            await store.images.wait_idle()
            store.images.check_integrity()

    asyncio.run(main())


def test_two_processes_do_not_share_a_folder(start):
    async def main() -> None:
        async with start():
            with pytest.raises(FailedPrecondition, match="another store"):
                async with start():
                    pass

    asyncio.run(main())


def test_deletion_grace_then_collection(start, make_adapter, make_layout, tmp_path, monkeypatch):
    folder = make_adapter()

    async def main() -> None:
        async with start(collect_seconds=0.1) as store:
            digest = (await register(store, folder)).digest
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            await store.precompiler.wait_idle()
            await store.use_cases.editing.delete(ANYONE, AdapterName("default", "a"), 0)
            with pytest.raises(NotFound):
                await store.use_cases.reading.get(ANYONE, AdapterRef(digest=digest))
            assert await pulled_bytes(store, ImageKey(digest, layout_id))
            monkeypatch.setattr(
                store.catalog.times, "now", lambda: datetime.now(UTC) + timedelta(days=1)
            )
            await until_async(lambda: not list((tmp_path / "data" / "blobs").iterdir()))
            await until_async(lambda: not store.images.memory_counts.images)
            with pytest.raises(NotFound):
                await pulled_bytes(store, ImageKey(digest, layout_id))
            assert list((tmp_path / "data" / "images").glob("*/*")) == []
            counts = store.images.memory_counts
            assert (counts.used_bytes, counts.images) == (0, 0)
            assert store.catalog.counts().blob_bytes == 0
            assert (await register(store, folder)).version == 2

    asyncio.run(main())


def test_parsed_layouts_are_bounded(start, make_adapter, make_layout, monkeypatch):
    layouts = [make_layout(), make_layout(dtype=DataType.BFLOAT16)]
    monkeypatch.setattr(layout_module, "MAX_CACHED_TARGETS", len(layouts[0].targets))
    loaded: list[str] = []
    load = Layouts.body

    def counted(self: Layouts, layout_id: str):
        loaded.append(layout_id)
        return load(self, layout_id)

    monkeypatch.setattr(Layouts, "body", counted)

    async def main() -> None:
        async with start(compile_ahead=False) as store:
            digest = (await register(store, make_adapter())).digest
            ids = [(await store.use_cases.layouts.register(each, [1]))[0] for each in layouts]
            for layout_id in ids:
                with pytest.raises(NotFound):
                    await pulled_bytes(store, ImageKey("sha256:" + "0" * 64, layout_id))
            assert loaded == [], "for content that nobody has"
            for layout_id in (ids[0], ids[0], ids[1]):
                store.images.drop_layouts(frozenset(ids))
                await pulled_bytes(store, ImageKey(digest, layout_id))
            assert loaded == ids
            cached = store.images._builder._layouts
            assert list(cached._layouts) == [ids[1]]
            assert cached._num_targets == len(layouts[1].targets)

    asyncio.run(main())


@pytest.mark.parametrize("settings", [{"compile_ahead": False}, {"disk_cache_bytes": 1}])
def test_what_is_not_compiled_ahead_is_checked_all_the_same(
    start, make_adapter, make_layout, compiles, settings
):
    """An adapter's owner learns at registration whether it can be served."""
    fitting = make_layout()
    targets = tuple(each for each in fitting.targets if "q_proj" not in each.name)
    other = make_layout(targets=targets)

    async def main() -> None:
        async with start(**settings) as store:
            ids = [
                (await store.use_cases.layouts.register(each, [1]))[0] for each in (fitting, other)
            ]
            folder = make_adapter()
            await register(store, folder)
            await register(store, folder, "b")
            await store.precompiler.wait_idle()
            record, _ = store.catalog.names.get(AdapterRef(AdapterName("default", "a")))
            verdicts = {each.layout_id: each for each in record.verdicts}
            assert [(verdicts[each].state, verdicts[each].fits) for each in ids] == [
                (ImageState.PENDING, True),
                (ImageState.INCOMPATIBLE, False),
            ]
            assert "has no" in verdicts[ids[1]].reason
            assert compiles.made == []
            await pulled_bytes(store, ImageKey(record.digest, ids[0]))
            await store.images.wait_idle()
            record, _ = store.catalog.names.get(AdapterRef(AdapterName("default", "a")))
            assert ImageState.READY in [each.state for each in record.verdicts]

    asyncio.run(main())


def test_compiling_ahead_stops_when_the_last_server_is_gone(
    start, make_adapter, make_layout, compiles, monkeypatch
):
    monkeypatch.setattr(precompile, "PAGE_DIGESTS", 1)
    served: list[str] = []
    monkeypatch.setattr(Layouts, "served", lambda _: served.copy())

    async def main() -> None:
        async with start() as store:
            for number in range(3):
                await register(store, make_adapter(folder=f"a{number}", seed=number), f"a{number}")
            compiles.gate.clear()
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            served.append(layout_id)
            store.precompiler.queue_layout(layout_id)
            await until_async(lambda: len(compiles.made) == 1)
            served.clear()
            compiles.gate.set()
            await store.precompiler.wait_idle()
            assert len(compiles.made) == 1

    asyncio.run(main())
