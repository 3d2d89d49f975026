"""Adapters that add tokens: servers take the number from the first answer that names them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.api.convert import to_adapter
from adapter_store.build import Store
from adapter_store.catalog.images import ImageStates
from adapter_store.catalog.tables import lookup
from adapter_store.core import ANYONE, AdapterRecord, ImageKey, LayoutVerdict, Principal
from adapter_store.errors import CatalogUnavailable, SourceUnavailable, disk_full
from adapter_store.images.builder import ImageBuilder
from adapter_store.images.precompile import Precompiler
from adapter_store.images.tiers import cache
from adapter_store.images.worker_pool import WorkerPool
from adapter_store.registration.registrar import Registration
from adapter_store.service import reading
from servicekit.errors import ShareExceeded
from servicekit.refs import AdapterName, AdapterRef
from tests.support.store.adapters import HIDDEN, VOCAB, MakeAdapter, all_targets, random_tensors
from tests.support.store.images import SECONDS, register
from tests.support.wait import until_async

Q = "model.layers.0.self_attn.q_proj"
ADDING, WRONG = (VOCAB + 2, HIDDEN), (3, 5)
"""Shapes of a head with two more tokens, and of one that is no head of the layout."""


class Plans:
    """The digests that were planned. Each plan waits for `go`, and fails with `failure`."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.failure: Exception | None = None
        self.go = threading.Event()
        self.go.set()


@pytest.fixture
def plans(monkeypatch):
    """Nothing but look-ups plans."""
    plans, plan_verdict = Plans(), ImageBuilder.plan_verdict

    def counted(self: ImageBuilder, key: ImageKey) -> LayoutVerdict:
        plans.digests.append(key.digest)
        assert plans.go.wait(SECONDS)
        if plans.failure is not None:
            raise plans.failure
        return plan_verdict(self, key)

    monkeypatch.setattr(ImageBuilder, "plan_verdict", counted)
    monkeypatch.setattr(Precompiler, "_queue", lambda *_, **__: None)
    yield plans
    plans.go.set()


def with_head(
    make_adapter: MakeAdapter, shape: tuple[int, int] = ADDING, folder: str = "head"
) -> Path:
    head = torch.ones(shape) + len(folder)
    tensors = {**random_tensors({Q: 4}), "base_model.model.lm_head.weight": head}
    options: dict[str, Any] = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}
    return make_adapter(tensors=tensors, folder=folder, **options)


async def get(store: Store, name: str = "a", caller: Principal = ANYONE) -> AdapterRecord:
    tenant = min(caller.tenants or {"default"})
    ref = AdapterRef(AdapterName(tenant, name))
    return (await store.use_cases.reading.get(caller, ref))[0]


def test_they_are_counted_before_an_image_is_compiled(start, make_adapter, make_layout, plans):
    """By one plan for all who ask; not again once it is known, nor of adapters without rows."""

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            await register(store, with_head(make_adapter))
            await register(store, make_adapter(folder="plain"), "plain")
            found = await asyncio.gather(*[get(store) for _ in range(3)])
            assert [record.added_tokens for record in found] == [2] * 3
            record = await get(store)
            assert record.added_tokens == 2
            await get(store, "plain")
            assert plans.digests == [record.digest]

    asyncio.run(main())


def test_who_cannot_be_planned_is_named_all_the_same(start, make_adapter, make_layout, plans):
    """The verdict says why."""

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            await register(store, with_head(make_adapter, WRONG))
            record = await get(store)
            assert (record.added_tokens, record.unplanned_layout) == (0, "")
            assert "lm_head" in record.verdicts[0].reason

    asyncio.run(main())


@pytest.mark.parametrize("shape", [ADDING, WRONG])
def test_content_that_another_tenant_has_is_planned_and_answered_as_new(
    start, make_adapter, make_layout, plans, monkeypatch, shape
):
    """Each tenant's first look-up plans, and its next one does not, though the catalog hides from
    the second tenant what it knows."""
    monkeypatch.setattr(lookup, "MIN_HIDDEN_MICROS", 600_000_000)
    folder = with_head(make_adapter, shape)

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            answers = []
            for count, tenant in enumerate(("fresh", "known"), 1):
                caller = replace(ANYONE, name=tenant, tenants=frozenset({tenant}))
                registering = store.use_cases.registering
                name = Registration(AdapterName(tenant, "a"))
                change = await registering.register(caller, name, f"file://{folder}")
                await change.wait()
                for _ in range(2):
                    found = to_adapter(await get(store, caller=caller))
                    answers.append((found.added_tokens, [*found.layout_states]))
                assert plans.digests == [found.digest] * count
            assert answers == answers[:1] * 4
            assert answers[0][0] == (2 if shape == ADDING else 0)

    asyncio.run(main())


def test_another_name_of_the_content_has_them_too(
    start, make_adapter, make_layout, plans, monkeypatch
):
    monkeypatch.setattr(lookup, "MIN_HIDDEN_MICROS", 600_000_000)

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            folder = with_head(make_adapter)
            for name in ("a", "b"):
                await register(store, folder, name)
                assert (await get(store, name)).added_tokens == 2

    asyncio.run(main())


def test_layouts_are_planned_until_the_adapter_fits_one(start, make_adapter, make_layout, plans):
    others = tuple(target for target in all_targets() if target.name != "lm_head")

    async def main() -> None:
        async with start() as store:
            layouts = store.use_cases.layouts
            good, *_ = await layouts.register(make_layout(), [1, 2])
            for number in range(4):
                wrong = make_layout(targets=others)
                await layouts.register(replace(wrong, config_sha256=f"{number:064x}"), [1, 2])
            await register(store, with_head(make_adapter))
            record = await get(store)
            ids = [each.layout_id for each in record.verdicts]
            assert ids.index(good) > 0, "this test needs one before it that the adapter fits not"
            assert record.added_tokens == 2
            assert len(plans.digests) == ids.index(good) + 1

    asyncio.run(main())


def refuse(*_: object) -> None:
    raise ShareExceeded("too many wait")


def no_workers(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "_wait_for_turn", refuse)


def failing(error: Exception) -> Callable[[Plans, pytest.MonkeyPatch], None]:
    return lambda plans, monkeypatch: setattr(plans, "failure", error)


@pytest.mark.parametrize(
    "fail",
    [
        no_workers,
        failing(SourceUnavailable("the bucket does not answer")),
        failing(CatalogUnavailable("no connection")),
        failing(OSError(5, "I/O error")),
        failing(ValueError("a bug")),
    ],
)
def test_where_planning_fails_the_catalog_answers(
    start, make_adapter, make_layout, plans, monkeypatch, caplog, fail
):
    """The log says so once."""
    caplog.set_level("INFO", "adapter_store.images.tiers.cache")

    async def main() -> None:
        async with start() as store:
            for number in range(2):
                layout = replace(make_layout(), config_sha256=f"{number:064x}")
                await store.use_cases.layouts.register(layout, [1, 2])
            await register(store, with_head(make_adapter))
            fail(plans, monkeypatch)
            assert (await get(store)).added_tokens == 0
            said = [each for each in caplog.messages if "planned" in each or "planning" in each]
            assert len(said) == 1

    asyncio.run(main())


def test_what_a_full_disk_does_not_record_is_answered(
    start, make_adapter, make_layout, plans, monkeypatch
):
    def full(*_: object) -> None:
        raise disk_full()

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            await register(store, with_head(make_adapter))
            monkeypatch.setattr(ImageStates, "set_fits", full)
            assert (await get(store)).added_tokens == 2

    asyncio.run(main())


def test_a_slow_plan_is_for_the_next_look_up(start, make_adapter, make_layout, plans, monkeypatch):
    monkeypatch.setattr(reading, "PLAN_WAIT_SECONDS", 0.01)
    plans.go.clear()

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            await register(store, with_head(make_adapter))
            assert [(await get(store)).added_tokens for _ in range(2)] == [0, 0]
            plans.go.set()
            await store.images.wait_idle()
            assert (await get(store)).added_tokens == 2
            assert len(plans.digests) == 1

    asyncio.run(main())


def test_a_tenant_with_many_plans_displaces_its_own(
    start, make_adapter, make_layout, plans, monkeypatch
):
    """The other's is still known, though the catalog hides it."""
    monkeypatch.setattr(lookup, "MIN_HIDDEN_MICROS", 600_000_000)
    monkeypatch.setattr(cache, "MAX_PLANNED", 3)
    folders = [with_head(make_adapter, folder="x" * length) for length in range(1, 6)]

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])

            async def plan(tenant: str, folder: Path, name: str) -> None:
                caller = replace(ANYONE, name=tenant, tenants=frozenset({tenant}))
                request = Registration(AdapterName(tenant, name))
                registering = store.use_cases.registering
                change = await registering.register(caller, request, f"file://{folder}")
                await change.wait()
                assert (await get(store, name, caller)).added_tokens == 2

            await plan("many", folders[0], "a0")
            await plan("one", folders[0], "mine")
            for number, folder in enumerate(folders[1:], 1):
                await plan("many", folder, f"a{number}")
            num_plans = len(plans.digests)
            caller = replace(ANYONE, name="one", tenants=frozenset({"one"}))
            assert (await get(store, "mine", caller)).added_tokens == 2
            assert len(plans.digests) == num_plans

    asyncio.run(main())


def test_plans_end_with_the_store(start, make_adapter, make_layout, plans, monkeypatch):
    """One that runs, and one that waits for a worker; who waits for them gets an answer."""
    plans.go.clear()
    monkeypatch.setattr(reading, "PLAN_WAIT_SECONDS", SECONDS)

    async def main() -> None:
        async with start(compile_workers=1) as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            for name in ("a", "other"):
                await register(store, with_head(make_adapter, folder=name), name)
            waiting = [asyncio.create_task(get(store, name)) for name in ("a", "other")]
            await until_async(lambda: plans.digests)
            await store.images.close()
            found = [*await asyncio.gather(*waiting), await get(store)]
            assert [record.added_tokens for record in found] == [0, 0, 0]
            assert len(plans.digests) == 1
            plans.go.set()

    asyncio.run(main())
