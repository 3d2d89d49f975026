"""Names, versions and digests resolve to adapters that this server can serve."""

import asyncio
from dataclasses import replace

import pytest

from contract.images.segment_kinds import SegmentKind
from inference_svc.core import ANYONE
from inference_svc.errors import AdapterNotFound, AdapterUnusable, StoreUnavailable
from inference_svc.store.adapter_resolver import Binding, Directory, Servable
from inference_svc.store.superseded import MAX_SUPERSEDED, SupersededVersions, Version
from inference_svc.store.types import AdapterRecord, LayoutVerdict, NameEvent
from servicekit.errors import InvalidArgument
from tests.inference_svc.directories import UPPER, A, B, make, run, until_lookups

C = "sha256:" + "c" * 64


def test_resolves_names_versions_and_digests() -> None:
    catalog, directory, _ = make()
    catalog.records |= {
        "default/upper@1": UPPER,
        A: UPPER,
        "team/upper": replace(UPPER, name="team/upper", digest=B, version=3),
    }

    async def body() -> None:
        assert (await directory.resolve(ANYONE, "upper")).label == "default/upper@1"
        assert (await directory.resolve(ANYONE, "default/upper@1")).digest == A
        by_digest = await directory.resolve(ANYONE, A)
        assert (by_digest.label, by_digest.tenant) == (A, "default")
        other = await directory.resolve(ANYONE, "team/upper")
        assert (other.label, other.tenant, other.digest) == ("team/upper@3", "team", B)
        assert directory.names_of(ANYONE, A) == ["default/upper", "default/upper@1"]
        assert directory.names_of(ANYONE, B) == ["team/upper"]

    run(body)


@pytest.mark.parametrize(
    "ref", ["Upper/x", "a/b/c", "upper@", "upper@0", "upper@x", "/x", "sha256:12", " x", "x\n"]
)
def test_malformed_reference_is_invalid(ref: str) -> None:
    _, directory, _ = make()
    with pytest.raises(InvalidArgument) as caught:
        run(lambda: directory.resolve(ANYONE, ref))
    assert caught.value.subject == "adapter"


def test_cache_answers_while_the_watch_is_live() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        for _ in range(10):
            await directory.resolve(ANYONE, "upper")
            clock.now_s += 1
            directory.apply(NameEvent(directory.revision))
        assert len(catalog.lookups) == 1

    run(body)


def test_change_is_seen_by_the_next_request() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 6
        directory.apply(NameEvent(6, "default/upper"))
        assert (await directory.resolve(ANYONE, "upper")).digest == B
        del catalog.records["default/upper"]
        directory.apply(NameEvent(7, "default/upper"))
        with pytest.raises(AdapterNotFound):
            await directory.resolve(ANYONE, "upper")
        assert directory.names_of(ANYONE, A) == ["default/upper@1"]  # what it last was
        assert directory.names_of(ANYONE, B) == ["default/upper@2"]

    run(body)


def test_repointed_name_is_reported_with_both_digests() -> None:
    catalog, directory, _ = make()
    moves: list[tuple[str, str]] = []
    directory.on_repointed = lambda old_digest, new_digest: moves.append((old_digest, new_digest))

    async def body() -> None:
        directory.apply(NameEvent(6, "default/upper", B))
        catalog.revision = 7
        await directory.resolve(ANYONE, "upper")
        directory.apply(NameEvent(7, "default/upper", A))  # registered again: nothing moves
        await directory.resolve(ANYONE, "upper")
        directory.apply(NameEvent(8, "default/upper", B))
        directory.apply(NameEvent(9, "default/upper", ""))
        directory.apply(NameEvent(10, "default/unknown", B))

    run(body)
    assert moves == [(A, B)]


def test_new_version_of_a_name_in_use_is_looked_up_before_it_is_requested() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        directory.apply(NameEvent(6, "default/upper", A, 1))
        await asyncio.sleep(0)
        assert catalog.lookups == [], "nobody has used the name here"
        catalog.revision = 6
        await directory.resolve(ANYONE, "upper")
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 7
        directory.apply(NameEvent(7, "default/upper", B, 2))
        await until_lookups(catalog, 2)
        assert (await directory.resolve(ANYONE, "upper", min_revision=7)).digest == B
        directory.apply(NameEvent(8, "default/upper"))
        await asyncio.sleep(0)
        assert catalog.lookups == ["default/upper"] * 2

    run(body)


def test_a_new_name_is_looked_up_before_it_is_requested_now_and_then() -> None:
    catalog, directory, clock = make(ahead_s=0.5)
    catalog.records["default/other"] = replace(UPPER, name="default/other", digest=B)
    moves: list[str] = []
    directory.on_repointed = lambda old_digest, new_digest: moves.append(new_digest)

    async def body() -> None:
        clock.now_s += 0.5
        catalog.revision = 7
        directory.apply(NameEvent(6, "default/upper", A, 1))
        directory.apply(NameEvent(7, "default/other", B, 1))
        await until_lookups(catalog, 1)
        assert (await directory.resolve(ANYONE, "upper", min_revision=7)).digest == A
        assert catalog.lookups == ["default/upper"], "the other one waits for its first request"
        clock.now_s += 0.5
        directory.apply(NameEvent(8, "default/other", A, 2))
        await until_lookups(catalog, 2)
        directory.apply(NameEvent(9, "default/other"))
        directory.apply(NameEvent(10, "default/third"))
        assert not moves, "nobody has used the other one here"
        catalog.revision = 11
        directory.apply(NameEvent(11, "default/upper", B, 2))
        assert moves == [B]
        await until_lookups(catalog, 3)

    run(body)


def test_superseded_versions_are_told_until_they_are_used_again() -> None:
    catalog, directory, _ = make()
    told: list[tuple[str, bool]] = []
    directory.on_superseded = lambda digest, is_superseded: told.append((digest, is_superseded))

    async def body() -> None:
        directory.apply(NameEvent(6, "default/upper", A, 1))  # nobody has used the name here
        catalog.revision = 6
        await directory.resolve(ANYONE, "upper")
        assert not directory.is_superseded(ANYONE, A)
        directory.apply(NameEvent(7, "default/upper", B, 2))
        directory.apply(NameEvent(8, "default/upper", C, 3))  # nobody has asked for B
        assert told == [(A, True), (B, True)]
        assert directory.names_of(ANYONE, B) == ["default/upper@2"]
        assert directory.is_superseded(ANYONE, B)
        catalog.revision = 8
        catalog.records["default/upper"] = replace(UPPER, version=3, digest=C)
        catalog.records["default/upper@1"] = UPPER
        await directory.resolve(ANYONE, "upper@1")  # a version by name is as good as any
        directory.apply(NameEvent(9, "default/upper", B, 2))  # and so is a rollback
        assert told[2:] == [(A, False), (B, False), (C, True)]
        directory.apply(NameEvent(10, "default/upper"))
        assert told[5:] == [(B, True)]
        assert [directory.is_superseded(ANYONE, each) for each in (A, B, C)] == [False, True, True]

    run(body)


def test_content_that_another_name_has_is_not_superseded() -> None:
    catalog, directory, _ = make()
    catalog.records["default/same"] = replace(UPPER, name="default/same")
    told: list[tuple[str, bool]] = []
    directory.on_superseded = lambda digest, is_superseded: told.append((digest, is_superseded))

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        await directory.resolve(ANYONE, "same")
        directory.apply(NameEvent(6, "default/upper", B, 2))
        assert told == []
        directory.apply(NameEvent(7, "default/same", B, 2))
        assert told == [(A, True)]

    run(body)


def test_superseded_versions_are_bounded() -> None:
    told: list[tuple[str, bool]] = []
    superseded = SupersededVersions(lambda *change: told.append(change))
    for number in range(MAX_SUPERSEDED + 2):
        old, new = Version(f"t/n{number}@1", f"old{number}"), Version(f"t/n{number}@2", "new")
        superseded.move(f"t/n{number}", old, new, is_used=False)
    assert told[-1] == ("old1", False)
    assert [bool(superseded.label(f"old{number}")) for number in (0, 1, 2)] == [False, False, True]
    assert superseded.previous("t/n0") is None


def test_deleted_name_also_removes_its_digest() -> None:
    catalog, directory, _ = make()
    catalog.records[A] = UPPER

    async def body() -> None:
        await directory.resolve(ANYONE, A)
        del catalog.records[A]
        directory.apply(NameEvent(6, "default/upper"))
        with pytest.raises(AdapterNotFound):
            await directory.resolve(ANYONE, A)

    run(body)


def test_answer_older_than_a_change_is_not_cached() -> None:
    """The lookup was under way when the name changed."""
    catalog, directory, _ = make()

    async def body() -> None:
        catalog.gate = asyncio.Event()
        resolving = asyncio.create_task(directory.resolve(ANYONE, "upper"))
        await until_lookups(catalog, 1)
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 6
        directory.apply(NameEvent(6, "default/upper"))
        catalog.gate.set()
        assert (await resolving).digest == B
        assert (await directory.resolve(ANYONE, "upper")).digest == B
        assert len(catalog.lookups) == 2

    run(body)


def test_min_revision_refreshes_older_entries_only() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper", min_revision=5)
        assert len(catalog.lookups) == 1
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 6
        assert (await directory.resolve(ANYONE, "upper", min_revision=5)).digest == A
        assert (await directory.resolve(ANYONE, "upper", min_revision=6)).digest == B
        directory.apply(NameEvent(9))
        await directory.resolve(ANYONE, "upper", min_revision=9)
        assert len(catalog.lookups) == 2

    run(body)


def test_unreached_revision_is_unavailable() -> None:
    _, directory, _ = make()
    with pytest.raises(StoreUnavailable, match="revision 99") as caught:
        run(lambda: directory.resolve(ANYONE, "upper", min_revision=99))
    assert caught.value.subject == "min_revision"


def test_silent_watch_makes_entries_stale() -> None:
    catalog, directory, clock = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        clock.now_s += 2.5
        assert not directory.is_live
        await directory.resolve(ANYONE, "upper")
        assert len(catalog.lookups) == 2

    run(body)


def test_entries_are_stale_until_the_missed_events_came() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        directory.watch_lost()
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        catalog.revision = 8
        directory.watch_started(8)
        directory.apply(NameEvent(6, "default/else"))
        assert not directory.is_live
        assert (await directory.resolve(ANYONE, "upper")).digest == B
        directory.apply(NameEvent(7, "default/upper"))
        directory.apply(NameEvent(8, "default/more"))
        assert directory.is_live
        assert (await directory.resolve(ANYONE, "upper")).digest == B

    run(body)


def test_reset_forgets_everything() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        directory.watch_lost()
        directory.reset(20)
        catalog.down = True
        with pytest.raises(StoreUnavailable):
            await directory.resolve(ANYONE, "upper")
        assert directory.revision == 20

    run(body)


def test_answer_from_before_a_reset_is_not_cached() -> None:
    """Changes between that answer and the reset are in no watch."""
    catalog, directory, _ = make()

    async def body() -> None:
        catalog.gate = asyncio.Event()
        resolving = asyncio.create_task(directory.resolve(ANYONE, "upper"))
        await until_lookups(catalog, 1)
        directory.reset(20)
        directory.watch_started(20)
        catalog.gate.set()
        await resolving
        catalog.revision = 20
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        assert (await directory.resolve(ANYONE, "upper")).digest == B

    run(body)


def test_answer_of_a_replica_behind_the_watch_is_discarded() -> None:
    """The answer predates a change that the watch has reported already."""
    catalog, directory, _ = make()

    async def body() -> None:
        # The change itself is not remembered: other events came after it.
        directory.apply(NameEvent(6, "default/upper"))
        directory.apply(NameEvent(7, "default/other"))
        resolving = asyncio.create_task(directory.resolve(ANYONE, "upper"))
        await until_lookups(catalog, 3)
        catalog.revision = 7
        catalog.records["default/upper"] = replace(UPPER, version=2, digest=B)
        assert (await resolving).digest == B
        catalog.revision = 6
        catalog.records["default/upper@1"] = UPPER
        assert (await directory.resolve(ANYONE, "upper")).digest == B, "from the cache"
        with pytest.raises(StoreUnavailable, match="has not reached revision 7"):
            await directory.resolve(ANYONE, "upper@1")

    run(body)


def test_lookup_is_shared_and_survives_a_cancelled_caller() -> None:
    catalog, directory, _ = make()

    async def body() -> None:
        catalog.gate = asyncio.Event()
        tasks = [asyncio.create_task(directory.resolve(ANYONE, "upper")) for _ in range(5)]
        await until_lookups(catalog, 1)
        tasks[0].cancel()
        await asyncio.sleep(0)
        catalog.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [r.digest for r in results[1:] if not isinstance(r, BaseException)] == [A] * 4
        assert len(catalog.lookups) == 1

    run(body)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            replace(UPPER, verdicts={"layout": LayoutVerdict(False, "q_proj is 64, not 32")}),
            "q_proj is 64, not 32",
        ),
        (replace(UPPER, rank=17), "rank 17, above this server's --max-rank 16"),
        (replace(UPPER, base_model="llama"), "base model 'llama'; this server runs 'base'"),
    ],
)
def test_adapter_that_cannot_be_served_is_unusable(record: AdapterRecord, message: str) -> None:
    catalog, directory, _ = make()
    catalog.records["default/upper"] = record

    async def body() -> None:
        with pytest.raises(AdapterUnusable, match=message):
            await directory.resolve(ANYONE, "upper")
        catalog.records["default/upper"] = UPPER
        await directory.resolve(ANYONE, "upper")  # the verdict may change without an event

    run(body)


def test_adapter_of_another_model_is_refused_though_their_layouts_are_equal() -> None:
    catalog, directory, _ = make()
    usable = {"layout": LayoutVerdict(True), "other": LayoutVerdict(False, "no")}
    catalog.records["default/upper"] = replace(UPPER, base_model="/models/b", verdicts=usable)
    with pytest.raises(AdapterUnusable, match="is for base model '/models/b'"):
        run(lambda: directory.resolve(ANYONE, "upper"))


def test_refused_version_leaves_the_names_of_another_with_its_bytes() -> None:
    catalog, directory, _ = make()
    catalog.records["default/upper"] = replace(UPPER, version=2)
    catalog.records["default/upper@1"] = replace(UPPER, base_model="llama")

    async def body() -> None:
        await directory.resolve(ANYONE, "upper")
        with pytest.raises(AdapterUnusable, match="base model 'llama'"):
            await directory.resolve(ANYONE, "upper@1")
        assert directory.names_of(ANYONE, A) == ["default/upper"]

    run(body)


def test_without_a_store_every_adapter_is_unknown() -> None:
    directory = Directory(None, Servable(("base",), 16), 300.0)
    with pytest.raises(AdapterNotFound, match="no adapter store"):
        run(lambda: directory.resolve(ANYONE, "upper"))


@pytest.mark.parametrize(
    ("targets", "kinds", "has_head"),
    [
        (("q_proj", "score"), (SegmentKind.FULL,), True),
        (("q_proj", "score"), (), False),
        (("norm", "q_proj"), (SegmentKind.FULL,), False),
    ],
)
def test_a_whole_weight_of_the_heads_module_is_a_head(
    targets: tuple[str, ...], kinds: tuple[SegmentKind, ...], has_head: bool
) -> None:
    catalog, directory, _ = make(head_modules=frozenset({"score"}))
    catalog.records["default/upper"] = replace(UPPER, targets=targets, segment_kinds=kinds)
    binding = run(lambda: directory.resolve(ANYONE, "upper"))
    assert binding.has_head == has_head
    assert Binding.of_parts([(binding, 1.0)]).has_head == has_head


@pytest.mark.parametrize("num_labels", [1000, 1001])
def test_names_of_labels_in_the_cache_are_bounded(
    monkeypatch: pytest.MonkeyPatch, num_labels: int
) -> None:
    monkeypatch.setattr("inference_svc.store.name_cache.MAX_LABELS", 2000)
    catalog, directory, _ = make()
    names = [f"default/n{i}" for i in range(3)]
    few = replace(UPPER, class_labels=("x",) * num_labels)
    catalog.records = {name: replace(few, name=name) for name in names}

    async def body() -> None:
        for name in (names[0], *names):
            await directory.resolve(ANYONE, name)
        assert directory.names_of(ANYONE, A) == (names[1:] if num_labels == 1000 else names[2:])

    run(body)


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.store.name_cache.MAX_ENTRIES", 3)
    catalog, directory, _ = make()
    names = [f"default/n{i}" for i in range(5)]
    catalog.records = {name: replace(UPPER, name=name) for name in names}

    async def body() -> None:
        for name in names:
            await directory.resolve(ANYONE, name)
        assert directory.names_of(ANYONE, A) == names[2:]

    run(body)


LIMITED = {
    "lora_targets": ("q_proj", "v_proj"),
    "modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "fused_modules": {"qkv_proj": ("q_proj", "k_proj", "v_proj")},
}


@pytest.mark.parametrize(
    ("record", "reason", "subject"),
    [
        (
            {"targets": ("k_proj", "q_proj")},
            "has a target k_proj, which is not among this server's --lora-targets (q_proj, v_proj)",
            "targets",
        ),
        (
            {"targets": ("o_proj", "qkv_proj")},
            "has targets k_proj, o_proj, which are not among this server's --lora-targets "
            "(q_proj, v_proj)",
            "targets",
        ),
        (
            {"segment_kinds": (SegmentKind.MAGNITUDE, 99)},
            "has segments of kind 99, which this server does not apply",
            "segment_kinds",
        ),
    ],
)
def test_adapters_beyond_what_this_server_applies(record, reason, subject) -> None:
    """Whatever the store says of them: an earlier one knows nothing of it."""
    catalog, directory, _ = make(**LIMITED)
    catalog.records["default/upper"] = replace(UPPER, **record)
    with pytest.raises(AdapterUnusable) as caught:
        run(lambda: directory.resolve(ANYONE, "upper"))
    assert caught.value.message == f"adapter default/upper@1 {reason}"
    assert caught.value.subject == subject


def test_targets_within_the_restriction_are_accepted() -> None:
    """And those by names that the model does not know, and weights that may equal the base's: the
    image says what they are."""
    catalog, directory, _ = make(**LIMITED)
    catalog.records["default/upper"] = replace(UPPER, targets=("q_proj", "c_attn"))
    assert run(lambda: directory.resolve(ANYONE, "upper")).digest == A
    record = replace(UPPER, targets=("o_proj", "q_proj"), segment_kinds=(SegmentKind.FULL,))
    catalog.records["default/upper"] = record
    assert run(lambda: directory.resolve(ANYONE, "upper")).digest == A
