"""Tenants: what a name means to a caller, and what it learns of other tenants' names."""

import asyncio
from dataclasses import replace

import pytest

from inference_svc.core import ANYONE, ROLES, Principal
from inference_svc.errors import AdapterNotFound
from inference_svc.store.content_owners import GRACE_SECONDS
from inference_svc.store.types import NameEvent
from tests.inference_svc.directories import UPPER, A, B, make, run, until_lookups


def principal_of(*tenants: str) -> Principal:
    return ROLES.principal("someone", ROLES.allowed, frozenset(tenants), tenants[0])


MINE = replace(UPPER, name="a/mine", digest=A)

THEIRS = replace(UPPER, name="b/theirs", digest=A)


def test_name_without_a_tenant_belongs_to_the_home_tenant() -> None:
    catalog, directory, _ = make()
    catalog.records |= {"a/mine": MINE, "b/mine": replace(MINE, name="b/mine", digest=B)}

    async def body() -> None:
        assert (await directory.resolve(principal_of("a"), "mine")).label == "a/mine@1"
        assert (await directory.resolve(principal_of("b"), "mine")).label == "b/mine@1"
        assert (await directory.resolve(principal_of("a", "b"), "b/mine")).label == "b/mine@1"
        assert (await directory.resolve(principal_of("b", "a"), "mine")).digest == B

    run(body)


@pytest.mark.parametrize("ref", ["b/theirs", "b/theirs@1", A])
def test_other_tenants_adapters_are_not_found(ref: str) -> None:
    catalog, directory, _ = make()
    there = {"b/theirs": THEIRS, "b/theirs@1": THEIRS, A: THEIRS}

    async def answer() -> tuple[str, list[tuple[str, ...]]]:
        catalog.lookup_tenants.clear()
        with pytest.raises(AdapterNotFound) as caught:
            await directory.resolve(principal_of("a"), ref)
        return str(caught.value), list(catalog.lookup_tenants)

    async def body() -> None:
        absent = await answer()
        assert absent == (f"no adapter {ref}", [("a",)])
        catalog.records |= there
        assert await answer() == absent
        # Its own tenant has used it: that is cached now, and changes nothing for others.
        assert (await directory.resolve(principal_of("b"), ref)).digest == A
        assert (await directory.resolve(principal_of("b", "c"), ref)).digest == A
        assert await answer() == absent
        assert await answer() == absent

    run(body)


def test_answer_for_another_tenant_is_rejected() -> None:
    catalog, directory, _ = make()
    catalog.records |= {"b/theirs": THEIRS, A: THEIRS}
    catalog._find = lambda ref, tenants: catalog.records.get(ref)  # type: ignore[method-assign]

    async def body() -> None:
        for ref in ("b/theirs", A):
            with pytest.raises(AdapterNotFound, match=f"no adapter {ref}"):
                await directory.resolve(principal_of("a"), ref)
        assert directory.names_of(ANYONE, A) == []

    run(body)


def test_digest_of_two_tenants_resolves_to_the_callers() -> None:
    catalog, directory, _ = make()
    catalog.shared[A] = [THEIRS, MINE]

    async def body() -> None:
        assert (await directory.resolve(principal_of("a"), A)).tenant == "a"
        assert (await directory.resolve(principal_of("b"), A)).tenant == "b"
        assert (await directory.resolve(principal_of("a", "b"), A)).tenant == "a"
        assert (await directory.resolve(ANYONE, A)).tenant == "b"
        assert catalog.lookups == [A, A, A]  # the third was cached
        # One of them is deleted: the other's entry stays.
        catalog.shared[A] = [MINE]
        directory.apply(NameEvent(6, "b/theirs"))
        assert (await directory.resolve(principal_of("a"), A)).tenant == "a"
        with pytest.raises(AdapterNotFound):
            await directory.resolve(principal_of("b"), A)

    run(body)


def test_names_and_ownership_are_visible_to_their_tenants() -> None:
    catalog, directory, _ = make()
    catalog.records |= {"a/mine": MINE, "b/theirs": THEIRS, A: MINE}

    async def body() -> None:
        assert not directory.is_owner(principal_of("a"), A)
        await directory.resolve(principal_of("a"), "mine")
        await directory.resolve(principal_of("a"), A)
        await directory.resolve(principal_of("b"), "theirs")
        assert directory.names_of(principal_of("a"), A) == ["a/mine"]
        assert directory.names_of(principal_of("b", "c"), A) == ["b/theirs"]
        assert directory.names_of(ANYONE, A) == ["a/mine", "b/theirs"]
        assert directory.is_owner(principal_of("a"), A)
        assert directory.is_owner(principal_of("c", "b"), A)
        assert not directory.is_owner(principal_of("c"), A)
        assert directory.is_owner(ANYONE, B)
        directory.apply(NameEvent(6, "a/mine"))
        assert directory.names_of(principal_of("a"), A) == []
        assert not directory.is_superseded(ANYONE, A)  # theirs is not
        directory.apply(NameEvent(7, "b/theirs"))
        assert directory.names_of(principal_of("b"), A) == ["b/theirs@1"]
        assert directory.is_superseded(principal_of("b"), A)
        assert not directory.is_superseded(principal_of("a"), A), "tells of another tenant's name"
        assert directory.is_owner(principal_of("a"), A)  # what is resident is still its own

    run(body)


def test_tenant_owns_a_deleted_adapter_through_the_grace() -> None:
    catalog, directory, clock = make()
    catalog.records |= {"a/mine": MINE, "b/theirs": THEIRS}
    catalog.shared[A] = [MINE, THEIRS]

    async def body() -> None:
        for tenant, name in (("a", "mine"), ("b", "theirs")):
            await directory.resolve(principal_of(tenant), name)
        catalog.shared[A] = [THEIRS]
        directory.apply(NameEvent(6, "a/mine"))
        clock.now_s += GRACE_SECONDS - 1
        catalog.lookups.clear()
        assert directory.is_owner(principal_of("a"), A)
        assert await directory.owned(principal_of("a"), [A, B]) == {A}
        assert catalog.lookups == []
        clock.now_s += 1
        assert not directory.is_owner(principal_of("a"), A)
        assert directory.is_owner(principal_of("b"), A)
        for _ in range(2):  # looked up once; an unowned digest not at all
            assert await directory.owned(principal_of("a"), [A, B]) == set()
        assert await directory.owned(principal_of("b"), [A, B]) == {A}
        assert catalog.lookups == [A]

    run(body)


@pytest.mark.parametrize("change", ["event", "list again"])
def test_stale_ownership_is_revalidated(change: str) -> None:
    """The name may point to other content now; its older versions still exist."""
    catalog, directory, clock = make()
    catalog.records["a/mine"] = MINE
    catalog.shared[A] = [MINE]

    async def body() -> None:
        await directory.resolve(principal_of("a"), "mine")
        if change == "event":
            directory.apply(NameEvent(6, "a/mine"))
        else:
            directory.reset(6)
        catalog.revision = 6
        clock.now_s += GRACE_SECONDS
        catalog.down = True
        assert await directory.owned(principal_of("a"), [A]) == set()  # it cannot be confirmed
        catalog.down = False
        clock.now_s += 10
        assert await directory.owned(principal_of("a"), [A]) == {A}
        clock.now_s += GRACE_SECONDS
        assert directory.is_owner(principal_of("a"), A)  # nothing has changed since

    run(body)


def test_answer_from_before_a_reset_makes_no_owner() -> None:
    catalog, directory, _ = make()
    catalog.records["a/mine"] = MINE
    catalog.gate = asyncio.Event()

    async def body() -> None:
        resolving = asyncio.create_task(directory.resolve(principal_of("a"), "mine"))
        await until_lookups(catalog, 1)
        assert catalog.gate is not None
        directory.reset(9)
        catalog.gate.set()
        await resolving
        assert not directory.is_owner(principal_of("a"), A)

    run(body)


def test_callers_of_different_tenants_do_not_share_a_lookup() -> None:
    catalog, directory, _ = make()
    catalog.records["b/theirs"] = THEIRS
    catalog.gate = asyncio.Event()

    async def body() -> None:
        tasks = [
            asyncio.create_task(directory.resolve(principal, "b/theirs"))
            for principal in (principal_of("b"), principal_of("a"), principal_of("b", "c"))
        ]
        await until_lookups(catalog, 2)
        catalog.gate.set()
        mine, theirs, too = await asyncio.gather(*tasks, return_exceptions=True)
        assert mine == too
        assert isinstance(theirs, AdapterNotFound)
        assert catalog.lookup_tenants == [(), ("a",)]

    run(body)


def test_content_that_a_name_moved_to_has_that_name() -> None:
    """Also before anybody has requested it, and while the store cannot be asked."""
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        catalog.down = True
        directory.apply(NameEvent(6, "default/upper", B, 2))
        assert directory.names_of(ANYONE, B) == ["default/upper@2"]
        assert directory.names_of(principal_of("a"), B) == []
        directory.apply(NameEvent(7, "default/upper", "sha256:" + "c" * 64, 3))
        assert directory.names_of(ANYONE, B) == ["default/upper@2"], "as the old one"
        assert directory.is_superseded(ANYONE, B)
        directory.apply(NameEvent(8, "default/upper", B, 4))
        assert directory.names_of(ANYONE, B) == ["default/upper@4"]
        directory.apply(NameEvent(9, "default/upper"))
        assert directory.names_of(ANYONE, B) == ["default/upper@4"], "deleted, and still resident"

    run(body)
