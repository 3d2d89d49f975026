import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from inference_svc.access import OPEN, Principal, Role
from inference_svc.errors import (
    AdapterNotFound,
    AdapterUnusable,
    InvalidRequest,
    StoreUnavailable,
)
from inference_svc.name_cache import AdapterRecord, LayoutVerdict
from inference_svc.names import Directory, NameEvent, Servable
from inference_svc.owners import GRACE_SECONDS

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
UPPER = AdapterRecord("default/upper", 1, A, rank=8, base_model="base", revision=5)


@dataclass
class FakeCatalog:
    """A store of one catalog; `asked` counts questions, `gate` holds answers back."""

    records: dict[str, AdapterRecord] = field(default_factory=lambda: {"default/upper": UPPER})
    revision: int = 5
    down: bool = False
    shared: dict[str, list[AdapterRecord]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    asked_for: list[tuple[str, ...]] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def get_adapter(self, ref: str, tenants: Collection[str] = ()) -> AdapterRecord:
        self.asked.append(ref)
        if self.down:
            raise StoreUnavailable("down")
        found, revision = self._find(ref, tenants), self.revision
        if self.gate is not None:
            await self.gate.wait()
        if found is None:
            raise AdapterNotFound(f"no adapter {ref}")
        return replace(found, revision=revision)

    def _find(self, ref: str, tenants: Collection[str]) -> AdapterRecord | None:
        self.asked_for.append(tuple(sorted(tenants)))
        found = [self.records[ref]] if ref in self.records else []
        found += self.shared.get(ref, [])
        mine = [r for r in found if not tenants or r.name.partition("/")[0] in tenants]
        return mine[0] if mine else None


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 20))  # type: ignore[arg-type]


def make(live: bool = True, **servable: Any) -> tuple[FakeCatalog, Directory, Clock]:
    catalog, clock = FakeCatalog(), Clock()
    limits = Servable(**{"base_models": ("base", "alias"), "max_lora_rank": 16, **servable})
    directory = Directory(catalog, limits, name_ttl_s=300.0, clock=clock)
    directory.layout_id = "layout"
    if live:
        directory.reset(catalog.revision)
        directory.begin(catalog.revision)
        directory.apply(NameEvent(catalog.revision))
    return catalog, directory, clock


def test_resolves_names_versions_and_digests() -> None:
    catalog, directory, _ = make()
    catalog.records |= {
        "default/upper@1": UPPER,
        A: UPPER,
        "team/upper": replace(UPPER, name="team/upper", digest=B, version=3),
    }

    async def body() -> None:
        assert (await directory.resolve(OPEN, "upper")).label == "default/upper@1"
        assert (await directory.resolve(OPEN, "default/upper@1")).digest == A
        by_digest = await directory.resolve(OPEN, A)
        assert (by_digest.label, by_digest.tenant) == (A, "default")
        other = await directory.resolve(OPEN, "team/upper")
        assert (other.label, other.tenant, other.digest) == ("team/upper@3", "team", B)
        assert directory.names_of(OPEN, A) == ["default/upper", "default/upper@1"]
        assert directory.names_of(OPEN, B) == ["team/upper"]

    run(body)


@pytest.mark.parametrize(
    "ref", ["Upper", "a/b/c", "upper@", "upper@0", "upper@x", "/x", "sha256:12", " x", "x\n"]
)
def test_what_is_no_reference_is_the_callers_error(ref: str) -> None:
    _, directory, _ = make()
    with pytest.raises(InvalidRequest) as caught:
        run(lambda: directory.resolve(OPEN, ref))
    assert caught.value.subject == "adapter"


def test_a_live_watch_answers_without_asking_the_store() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        for _ in range(10):
            await directory.resolve(OPEN, "upper")
            clock.now_s += 1
            directory.apply(NameEvent(directory.revision))
        assert len(catalog.asked) == 1

    run(body)


def test_a_change_is_seen_at_the_next_request() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 6
        directory.apply(NameEvent(6, "default/upper"))
        assert (await directory.resolve(OPEN, "upper")).digest == B
        del catalog.records["default/upper"]
        directory.apply(NameEvent(7, "default/upper"))
        with pytest.raises(AdapterNotFound):
            await directory.resolve(OPEN, "upper")
        assert directory.names_of(OPEN, A) == directory.names_of(OPEN, B) == []

    run(body)


def test_a_name_in_use_that_moves_is_told_with_both_digests() -> None:
    catalog, directory, _ = make()
    moves: list[tuple[str, str]] = []
    directory.on_repointed = lambda old_digest, new_digest: moves.append((old_digest, new_digest))

    async def body() -> None:
        directory.apply(NameEvent(6, "default/upper", B))
        catalog.revision = 7
        await directory.resolve(OPEN, "upper")
        directory.apply(NameEvent(7, "default/upper", A))  # registered again: nothing moves
        await directory.resolve(OPEN, "upper")
        directory.apply(NameEvent(8, "default/upper", B))
        directory.apply(NameEvent(9, "default/upper", ""))
        directory.apply(NameEvent(10, "default/unknown", B))

    run(body)
    assert moves == [(A, B)]


def test_a_deleted_name_also_takes_its_digest_entry() -> None:
    catalog, directory, _ = make()
    catalog.records[A] = UPPER

    async def body() -> None:
        await directory.resolve(OPEN, A)
        del catalog.records[A]
        directory.apply(NameEvent(6, "default/upper"))
        with pytest.raises(AdapterNotFound):
            await directory.resolve(OPEN, A)

    run(body)


def test_an_answer_older_than_a_change_is_not_kept() -> None:
    """The question was under way when the name changed."""
    catalog, directory, _ = make()

    async def body() -> None:
        catalog.gate = asyncio.Event()
        asking = asyncio.create_task(directory.resolve(OPEN, "upper"))
        await asyncio.sleep(0.01)
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 6
        directory.apply(NameEvent(6, "default/upper"))
        catalog.gate.set()
        assert (await asking).digest == B
        assert (await directory.resolve(OPEN, "upper")).digest == B
        assert len(catalog.asked) == 2

    run(body)


def test_min_revision_asks_again_only_when_the_entry_is_older() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper", min_revision=5)
        assert len(catalog.asked) == 1
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 6
        assert (await directory.resolve(OPEN, "upper", min_revision=5)).digest == A
        assert (await directory.resolve(OPEN, "upper", min_revision=6)).digest == B
        directory.apply(NameEvent(9))
        await directory.resolve(OPEN, "upper", min_revision=9)
        assert len(catalog.asked) == 2

    run(body)


def test_a_revision_that_the_store_has_not_reached_is_unavailable() -> None:
    _, directory, _ = make()
    with pytest.raises(StoreUnavailable, match="revision 99") as caught:
        run(lambda: directory.resolve(OPEN, "upper", min_revision=99))
    assert caught.value.subject == "min_revision"


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
    monkeypatch.setattr("inference_svc.names.PATIENCE_SECONDS", 0.05)


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


def test_a_silent_watch_is_no_proof() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        clock.now_s += 2.5
        assert not directory.is_live
        await directory.resolve(OPEN, "upper")
        assert len(catalog.asked) == 2

    run(body)


def test_after_a_gap_entries_count_only_once_the_missed_events_have_come() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        directory.lost()
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 8
        directory.begin(8)
        directory.apply(NameEvent(6, "default/else"))
        assert not directory.is_live
        assert (await directory.resolve(OPEN, "upper")).digest == B
        directory.apply(NameEvent(7, "default/upper"))
        directory.apply(NameEvent(8, "default/more"))
        assert directory.is_live
        assert (await directory.resolve(OPEN, "upper")).digest == B

    run(body)


def test_reset_forgets_everything() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(OPEN, "upper")
        directory.lost()
        directory.reset(20)
        catalog.down = True
        with pytest.raises(StoreUnavailable):
            await directory.resolve(OPEN, "upper")
        assert directory.revision == 20

    run(body)


def test_an_answer_from_before_a_reset_is_not_kept() -> None:
    """Changes between that answer and the reset are in no watch."""
    catalog, directory, _ = make()

    async def body() -> None:
        catalog.gate = asyncio.Event()
        asking = asyncio.create_task(directory.resolve(OPEN, "upper"))
        await asyncio.sleep(0.01)
        directory.reset(20)
        directory.begin(20)
        catalog.gate.set()
        await asking
        catalog.revision = 20
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        assert (await directory.resolve(OPEN, "upper")).digest == B

    run(body)


def test_a_replica_behind_the_watch_is_asked_again_and_not_believed() -> None:
    """Its answer would go back in time: the watch has told of the change already."""
    catalog, directory, _ = make()

    async def body() -> None:
        # Nothing remembers that the name has changed: other events came after.
        directory.apply(NameEvent(6, "default/upper"))
        directory.apply(NameEvent(7, "default/other"))
        resolving = asyncio.create_task(directory.resolve(OPEN, "upper"))
        while len(catalog.asked) < 3:
            await asyncio.sleep(0.01)
        catalog.revision = 7
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        assert (await resolving).digest == B
        catalog.revision = 6
        catalog.records["default/upper@1"] = UPPER
        assert (await directory.resolve(OPEN, "upper")).digest == B, "from what is known"
        with pytest.raises(StoreUnavailable, match="has not reached revision 7"):
            await directory.resolve(OPEN, "upper@1")

    run(body)


def test_one_question_serves_all_who_wait_and_survives_who_leaves() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        catalog.gate = asyncio.Event()
        tasks = [asyncio.create_task(directory.resolve(OPEN, "upper")) for _ in range(5)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.sleep(0)
        catalog.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [r.digest for r in results[1:] if not isinstance(r, BaseException)] == [A] * 4
        assert len(catalog.asked) == 1

    run(body)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            replace(UPPER, verdicts={"layout": LayoutVerdict(False, "q_proj is 64, not 32")}),
            "q_proj is 64, not 32",
        ),
        (replace(UPPER, rank=17), "rank 17, above this server's max_lora_rank 16"),
        (replace(UPPER, base_model="llama"), "base model 'llama'; this server runs 'base'"),
    ],
)
def test_what_this_server_cannot_serve_is_unusable(record: AdapterRecord, message: str) -> None:
    catalog, directory, _ = make()
    catalog.records["default/upper"] = record

    async def body() -> None:
        with pytest.raises(AdapterUnusable, match=message):
            await directory.resolve(OPEN, "upper")
        catalog.records["default/upper"] = UPPER
        await directory.resolve(OPEN, "upper")  # the verdict may change without an event

    run(body)


def test_the_stores_verdict_outweighs_the_name_of_the_base() -> None:
    catalog, directory, _ = make()
    usable = {"layout": LayoutVerdict(True), "other": LayoutVerdict(False, "no")}
    catalog.records["default/upper"] = replace(UPPER, base_model="/models/b", verdicts=usable)
    assert run(lambda: directory.resolve(OPEN, "upper")).digest == A


def test_without_a_store_every_adapter_is_unknown() -> None:
    directory = Directory(None, Servable(("base",), 16), 300.0)
    with pytest.raises(AdapterNotFound, match="no adapter store"):
        run(lambda: directory.resolve(OPEN, "upper"))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.name_cache.MAX_ENTRIES", 3)
    catalog, directory, _ = make()
    names = [f"default/n{i}" for i in range(5)]
    catalog.records = {name: replace(UPPER, name=name) for name in names}

    async def body() -> None:
        for name in names:
            await directory.resolve(OPEN, name)
        assert directory.names_of(OPEN, A) == names[2:]

    run(body)


# --- whose adapters -----------------------------------------------------------------------------


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
