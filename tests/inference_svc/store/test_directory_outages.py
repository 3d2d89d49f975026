"""Names go on resolving, as long as they may, while the store does not answer."""

import asyncio
from dataclasses import replace

import pytest

from inference_svc.access import OPEN
from inference_svc.errors import (
    StoreUnavailable,
)
from inference_svc.store.directory import NameEvent
from tests.inference_svc.directories import UPPER, A, B, make, run


def test_names_resolve_for_their_ttl_while_the_store_is_unreachable() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        clock.now_s += 1000
        directory.apply(NameEvent(5))
        catalog.down = True
        directory.lost()
        clock.now_s += 299
        assert (await directory.resolve(OPEN, "upper")).digest == A
        with pytest.raises(StoreUnavailable):
            await directory.resolve(OPEN, "other")
        with pytest.raises(StoreUnavailable):
            await directory.resolve(OPEN, "upper", min_revision=6)
        clock.now_s += 2
        with pytest.raises(StoreUnavailable):
            await directory.resolve(OPEN, "upper")

    run(body)


def test_an_unreachable_store_is_not_asked_for_every_request() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        catalog.down = True
        directory.lost()
        clock.now_s += 5
        for _ in range(20):
            await directory.resolve(OPEN, "upper")
        assert len(catalog.asked) == 2

    run(body)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.store.directory.PATIENCE_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_store_that_hangs_delays_a_known_name_once() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        catalog.gate = asyncio.Event()  # never set: it is asked and does not answer
        directory.lost()
        for _ in range(3):
            async with asyncio.timeout(5):
                assert (await directory.resolve(OPEN, "upper")).digest == A
        assert len(catalog.asked) == 2

    run(body)


@pytest.mark.usefixtures("impatient")
def test_a_changed_name_is_not_used_when_patience_ends() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        catalog.gate = asyncio.Event()
        clock.now_s += 5
        asking = asyncio.create_task(directory.resolve(OPEN, "upper"))
        await asyncio.sleep(0.01)
        directory.apply(NameEvent(6, "default/upper"))
        with pytest.raises(StoreUnavailable):
            await asking

    run(body)


def test_a_revision_from_the_future_does_not_count_as_an_outage() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        directory.lost()
        with pytest.raises(StoreUnavailable):
            await directory.resolve(OPEN, "upper", min_revision=99)
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        assert (await directory.resolve(OPEN, "upper")).digest == B

    run(body)
