"""Whose adapters: what a name means to a caller, and what others' names tell it."""

import asyncio
from dataclasses import replace

import pytest

from inference_svc.access import OPEN, Principal, Role
from inference_svc.errors import (
    AdapterNotFound,
)
from inference_svc.store.directory import NameEvent
from inference_svc.store.ownership import GRACE_SECONDS
from tests.inference_svc.directories import UPPER, A, B, make, run


def of(*tenants: str) -> Principal:
    return Principal("someone", frozenset(Role), frozenset(tenants), tenants[0])


MINE = replace(UPPER, name="a/mine", digest=A)

THEIRS = replace(UPPER, name="b/theirs", digest=A)


def test_a_name_without_a_tenant_is_one_of_the_home() -> None:
    catalog, directory, _ = make()
    catalog.records |= {"a/mine": MINE, "b/mine": replace(MINE, name="b/mine", digest=B)}

    async def body() -> None:
        assert (await directory.resolve(of("a"), "mine")).label == "a/mine@1"
        assert (await directory.resolve(of("b"), "mine")).label == "b/mine@1"
        assert (await directory.resolve(of("a", "b"), "b/mine")).label == "b/mine@1"
        assert (await directory.resolve(of("b", "a"), "mine")).digest == B

    run(body)


@pytest.mark.parametrize("ref", ["b/theirs", "b/theirs@1", A])
def test_what_only_others_have_is_not_there_whatever_is_known_of_it(ref: str) -> None:
    catalog, directory, _ = make()
    there = {"b/theirs": THEIRS, "b/theirs@1": THEIRS, A: THEIRS}

    async def answer() -> tuple[str, list[tuple[str, ...]]]:
        catalog.asked_for.clear()
        with pytest.raises(AdapterNotFound) as caught:
            await directory.resolve(of("a"), ref)
        return str(caught.value), list(catalog.asked_for)

    async def body() -> None:
        absent = await answer()
        assert absent == (f"no adapter {ref}", [("a",)])
        catalog.records |= there
        assert await answer() == absent
        # Its own tenant has used it: that is known here now, and changes nothing for others.
        assert (await directory.resolve(of("b"), ref)).digest == A
        assert (await directory.resolve(of("b", "c"), ref)).digest == A
        assert await answer() == absent
        assert await answer() == absent

    run(body)


def test_a_store_that_does_not_look_at_tenants_changes_nothing() -> None:
    catalog, directory, _ = make()
    catalog.records |= {"b/theirs": THEIRS, A: THEIRS}
    catalog._find = lambda ref, tenants: catalog.records.get(ref)  # type: ignore[method-assign]

    async def body() -> None:
        for ref in ("b/theirs", A):
            with pytest.raises(AdapterNotFound, match=f"no adapter {ref}"):
                await directory.resolve(of("a"), ref)
        assert directory.names_of(OPEN, A) == []

    run(body)


def test_one_digest_of_two_tenants_is_each_ones_own() -> None:
    catalog, directory, _ = make()
    catalog.shared[A] = [THEIRS, MINE]

    async def body() -> None:
        assert (await directory.resolve(of("a"), A)).tenant == "a"
        assert (await directory.resolve(of("b"), A)).tenant == "b"
        assert (await directory.resolve(of("a", "b"), A)).tenant == "a"
        assert (await directory.resolve(OPEN, A)).tenant == "b"
        assert catalog.asked == [A, A, A]  # the third had its answer here
        # One of them is gone: the other's answer stays.
        catalog.shared[A] = [MINE]
        directory.apply(NameEvent(6, "b/theirs"))
        assert (await directory.resolve(of("a"), A)).tenant == "a"
        with pytest.raises(AdapterNotFound):
            await directory.resolve(of("b"), A)

    run(body)


def test_names_and_ownership_are_told_to_their_tenants() -> None:
    catalog, directory, _ = make()
    catalog.records |= {"a/mine": MINE, "b/theirs": THEIRS, A: MINE}

    async def body() -> None:
        assert not directory.is_owner(of("a"), A)
        await directory.resolve(of("a"), "mine")
        await directory.resolve(of("a"), A)
        await directory.resolve(of("b"), "theirs")
        assert directory.names_of(of("a"), A) == ["a/mine"]
        assert directory.names_of(of("b", "c"), A) == ["b/theirs"]
        assert directory.names_of(OPEN, A) == ["a/mine", "b/theirs"]
        assert directory.is_owner(of("a"), A)
        assert directory.is_owner(of("c", "b"), A)
        assert not directory.is_owner(of("c"), A)
        assert directory.is_owner(OPEN, B)
        directory.apply(NameEvent(6, "a/mine"))
        assert directory.names_of(of("a"), A) == []
        assert directory.is_owner(of("a"), A)  # what is resident is still its own

    run(body)


def test_a_tenant_that_deleted_its_record_is_an_owner_until_the_grace_is_over() -> None:
    catalog, directory, clock = make()
    catalog.records |= {"a/mine": MINE, "b/theirs": THEIRS}
    catalog.shared[A] = [MINE, THEIRS]

    async def body() -> None:
        for tenant, name in (("a", "mine"), ("b", "theirs")):
            await directory.resolve(of(tenant), name)
        catalog.shared[A] = [THEIRS]
        directory.apply(NameEvent(6, "a/mine"))
        clock.now_s += GRACE_SECONDS - 1
        catalog.asked.clear()
        assert directory.is_owner(of("a"), A)
        assert await directory.owned(of("a"), [A, B]) == {A}
        assert catalog.asked == []
        clock.now_s += 1
        assert not directory.is_owner(of("a"), A)
        assert directory.is_owner(of("b"), A)
        for _ in range(2):  # asked once, as nobody's digest is not asked about at all
            assert await directory.owned(of("a"), [A, B]) == set()
        assert await directory.owned(of("b"), [A, B]) == {A}
        assert catalog.asked == [A]

    run(body)


@pytest.mark.parametrize("change", ["event", "list again"])
def test_an_owner_stays_one_as_long_as_the_store_says_so(change: str) -> None:
    """The name may have gone on to another content; its older versions are there all the same."""
    catalog, directory, clock = make()
    catalog.records["a/mine"] = MINE
    catalog.shared[A] = [MINE]

    async def body() -> None:
        await directory.resolve(of("a"), "mine")
        if change == "event":
            directory.apply(NameEvent(6, "a/mine"))
        else:
            directory.reset(6)
        catalog.revision = 6
        clock.now_s += GRACE_SECONDS
        catalog.down = True
        assert await directory.owned(of("a"), [A]) == set()  # it cannot be affirmed
        catalog.down = False
        clock.now_s += 10
        assert await directory.owned(of("a"), [A]) == {A}
        clock.now_s += GRACE_SECONDS
        assert directory.is_owner(of("a"), A)  # nothing has changed since

    run(body)


def test_an_answer_from_before_the_list_makes_no_owner() -> None:
    catalog, directory, _ = make()
    catalog.records["a/mine"] = MINE
    catalog.gate = asyncio.Event()

    async def body() -> None:
        asking = asyncio.create_task(directory.resolve(of("a"), "mine"))
        while not catalog.asked:
            await asyncio.sleep(0)
        assert catalog.gate is not None
        directory.reset(9)
        catalog.gate.set()
        await asking
        assert not directory.is_owner(of("a"), A)

    run(body)


def test_callers_of_different_tenants_do_not_share_a_question() -> None:
    catalog, directory, _ = make()
    catalog.records["b/theirs"] = THEIRS
    catalog.gate = asyncio.Event()

    async def body() -> None:
        asks = [
            asyncio.create_task(directory.resolve(who, "b/theirs"))
            for who in (of("b"), of("a"), of("b", "c"))
        ]
        while len(catalog.asked) < 2:
            await asyncio.sleep(0)
        catalog.gate.set()
        mine, theirs, too = await asyncio.gather(*asks, return_exceptions=True)
        assert mine == too
        assert isinstance(theirs, AdapterNotFound)
        assert catalog.asked_for == [(), ("a",)]

    run(body)
