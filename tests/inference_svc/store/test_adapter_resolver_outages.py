"""Names keep resolving for their TTL while the store is unreachable."""

import asyncio
from dataclasses import replace

import pytest

from inference_svc.core import ANYONE
from inference_svc.errors import StoreUnavailable
from inference_svc.store.types import NameEvent
from tests.inference_svc.directories import UPPER, A, B, make, run, until_lookups


def test_names_resolve_for_their_ttl_while_the_store_is_unreachable() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        clock.now_s += 1000
        directory.apply(NameEvent(5))
        catalog.down = True
        directory.watch_lost()
        clock.now_s += 299
        assert (await directory.resolve(ANYONE, "upper")).digest == A
        words = (
            r"adapter default/other cannot be looked up: down; try again later \(this server's log"
        )
        with pytest.raises(StoreUnavailable, match=words):
            await directory.resolve(ANYONE, "other")
        with pytest.raises(StoreUnavailable):
            await directory.resolve(ANYONE, "upper", min_revision=6)
        clock.now_s += 2
        with pytest.raises(StoreUnavailable):
            await directory.resolve(ANYONE, "upper")

    run(body)


def test_store_that_is_behind_has_nothing_in_the_log() -> None:
    _, directory, _ = make()
    with pytest.raises(StoreUnavailable, match=r"revision 6; try again later$"):
        run(lambda: directory.resolve(ANYONE, "upper", min_revision=6))


def test_unreachable_store_is_not_called_for_every_request() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        catalog.down = True
        directory.watch_lost()
        clock.now_s += 5
        for _ in range(20):
            await directory.resolve(ANYONE, "upper")
        assert len(catalog.lookups) == 2

    run(body)


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.store.adapter_resolver.STALE_WAIT_SECONDS", 0.05)


@pytest.mark.usefixtures("short_wait")
def test_hanging_store_delays_a_cached_name_once() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        catalog.gate = asyncio.Event()  # never set: lookups hang
        directory.watch_lost()
        for _ in range(3):
            async with asyncio.timeout(60):
                assert (await directory.resolve(ANYONE, "upper")).digest == A
        assert len(catalog.lookups) == 2

    run(body)


@pytest.mark.usefixtures("short_wait")
def test_changed_name_is_not_used_after_the_wait() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        catalog.gate = asyncio.Event()
        clock.now_s += 5
        resolving = asyncio.create_task(directory.resolve(ANYONE, "upper"))
        await until_lookups(catalog, 2)
        directory.apply(NameEvent(6, "default/upper"))
        with pytest.raises(StoreUnavailable):
            await resolving

    run(body)


def test_future_revision_is_no_outage() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        directory.watch_lost()
        with pytest.raises(StoreUnavailable):
            await directory.resolve(ANYONE, "upper", min_revision=99)
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        assert (await directory.resolve(ANYONE, "upper")).digest == B

    run(body)
