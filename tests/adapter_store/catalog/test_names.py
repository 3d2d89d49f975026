"""What a registration, a deletion and a pin do to a name."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables import leftovers
from adapter_store.core import EventKind, ImageKey, SignatureState, SourceFile
from adapter_store.errors import Conflict, LimitExceeded
from servicekit.errors import NotFound
from servicekit.refs import AdapterName, AdapterRef
from tests.support.store.catalogs import ReceivedEvents, connected

A = AdapterName("default", "a")


def kinds(catalog: Catalog) -> list[EventKind]:
    return [event.kind for event in catalog.history.since(0, 1000)]


def test_new_content_is_the_next_version_and_current(names):
    first, revision = names.register("a", "d1")
    assert (first.version, revision) == (1, 1)
    second, revision = names.register("a", "d2")
    assert (second.version, revision) == (2, 2)
    assert names.get("a").digest == "d2"
    assert names.get("a", 1).digest == "d1"


def test_the_same_content_is_the_same_version_and_no_event(names, catalog):
    _, revision = names.register("a", "d1")
    names.register("b", "d2")
    again, revision_again = names.register("a", "d1")
    assert (again.version, revision_again) == (1, revision)
    assert len(kinds(catalog)) == 2


def test_old_content_makes_its_version_current_again(names, catalog):
    names.register("a", "d1")
    names.register("a", "d2")
    back, revision = names.register("a", "d1")
    assert (back.version, revision) == (1, 3)
    assert kinds(catalog)[-1] is EventKind.UPDATED
    assert names.register("a", "d3")[0].version == 3


def test_content_for_another_base_is_another_version(names):
    names.register("a", "d1")
    assert names.register("a", "d1", base_model="org/other")[0].version == 2


def test_if_current_digest(names):
    with pytest.raises(Conflict, match="nothing") as caught:
        names.register("a", "d1", if_current="d0")
    assert caught.value.subject == "if_current_digest"
    names.register("a", "d1")
    names.register("a", "d2", if_current="d1")
    with pytest.raises(Conflict, match="d2"):
        names.register("a", "d3", if_current="d1")
    assert names.get("a").version == 2


def test_labels_are_of_the_version(names, catalog):
    names.register("a", "d1", labels={"team": "x"})
    assert names.register("a", "d1")[0].labels == {"team": "x"}
    changed, revision = names.register("a", "d1", labels={"team": "y"})
    assert (changed.labels, changed.version, revision) == ({"team": "y"}, 1, 2)
    assert names.register("a", "d2")[0].labels == {}
    assert kinds(catalog) == [EventKind.REGISTERED, EventKind.UPDATED, EventKind.UPDATED]


def test_the_pin_moves_with_the_name(names, catalog):
    names.register("a", "d1", pinned=True)
    assert names.register("a", "d2")[0].pinned
    assert not names.get("a", 1).pinned
    assert names.register("a", "d1")[0].pinned
    assert not names.get("a", 2).pinned


def test_pin_and_unpin_once(names, catalog):
    names.register("a", "d1")
    for _ in range(2):
        record, revision = catalog.names.set_pinned(names.ref("a"), True, 100)
        assert (record.pinned, revision) == (True, 2)
    for _ in range(2):
        record, revision = catalog.names.set_pinned(names.ref("a"), False, 100)
        assert (record.pinned, revision) == (False, 3)
    assert kinds(catalog)[1:] == [EventKind.PINNED, EventKind.UNPINNED]


def test_pinned_images_must_fit_into_memory(names, catalog):
    from adapter_store.core import ImageState, LayoutVerdict

    catalog.layouts.add("L", "org/tiny", "{}")
    names.register("a", "d1")
    catalog.images.set_verdict("d1", LayoutVerdict("L", ImageState.READY, image_bytes=101))
    with pytest.raises(LimitExceeded, match="101 of 100"):
        catalog.names.set_pinned(names.ref("a"), True, 100)
    assert not names.get("a").pinned
    assert kinds(catalog) == [EventKind.REGISTERED]


def test_delete_a_name(names, catalog):
    names.register("a", "d1")
    names.register("a", "d2")
    assert catalog.names.remove(A)[1] == 3
    for ref in (names.ref("a"), names.ref("a", 1), AdapterRef(digest="d2")):
        with pytest.raises(NotFound):
            catalog.names.get(ref)
    with pytest.raises(NotFound, match="default/a"):
        catalog.names.remove(A)
    last = catalog.history.since(2, 10)[0]
    assert (last.kind, last.version, last.digest) == (EventKind.DELETED, 0, "d2")


def test_version_numbers_are_never_reused(names, catalog):
    names.register("a", "d1")
    catalog.names.remove(A)
    again, _ = names.register("a", "d2")
    assert again.version == 2
    assert kinds(catalog)[-1] is EventKind.REGISTERED
    with pytest.raises(NotFound, match="default/a@1"):
        names.get("a", 1)


def test_deleting_the_current_version(names, catalog):
    for digest in ("d1", "d2", "d3"):
        names.register("a", digest)
    catalog.names.remove(A, 3)
    assert names.get("a").version == 2
    catalog.names.remove(A, 1)
    assert names.get("a").version == 2
    last = catalog.history.since(4, 10)[-1]
    assert (last.kind, last.version, last.digest) == (EventKind.UPDATED, 2, "d2")
    catalog.names.remove(A, 2)
    with pytest.raises(NotFound):
        names.get("a")
    assert kinds(catalog)[-1] is EventKind.DELETED


def test_deleting_what_is_not_there_names_it(names, catalog):
    names.register("a", "d1")
    with pytest.raises(NotFound, match="default/a@7") as caught:
        catalog.names.remove(A, 7)
    assert caught.value.subject == "default/a@7"


def test_what_is_known_of_a_version_is_recorded(names):
    files = (SourceFile("adapter_config.json", 10, "ab"), SourceFile("x.safetensors", 20, "cd"))
    given = {
        "description": "about refunds",
        "created_by": "trainer",
        "source_revision": "0f3c",
        "config_base_model": "/mnt/models/llama",
        "files": files,
        "signed_by": "release",
        "signature": b"s" * 64,
    }
    names.register("a", "d1", **given)
    record = names.get("a")
    assert {key: getattr(record, key) for key in given} == given
    assert record.signature_state is SignatureState.VERIFIED
    assert names.register("a", "d1", created_by="other", files=())[0] == record
    changed, revision = names.register("a", "d1", description="new")
    assert (changed.description, changed.created_by, revision) == ("new", "trainer", 2)
    other, _ = names.register("a", "d2")
    assert (other.files, other.signature_state) == ((), SignatureState.UNSIGNED)


def test_a_digest_means_its_first_current_record(names, catalog):
    names.register("z/old", "d1")
    names.register("z/old", "d2")
    names.register("y/now", "d1")
    assert str(catalog.names.get(AdapterRef(digest="d1"))[0].name) == "y/now"
    names.register("y/now", "d3")
    names.register("z/old", "d1")
    assert str(catalog.names.get(AdapterRef(digest="d1"))[0].name) == "z/old"


def test_a_digest_is_pullable_through_the_grace(names, catalog, clock):
    grace = timedelta(seconds=60)
    names.register("a", "d1")
    catalog.names.remove(A)
    assert catalog.images.access(ImageKey("d1", "L"), grace).has_record
    clock.now += grace
    assert not catalog.images.access(ImageKey("d1", "L"), grace).has_record
    assert not catalog.images.access(ImageKey("d0", "L"), grace).has_record


def test_collecting_ends_what_no_record_has(names, catalog, clock):
    names.register("a", "d1")
    names.register("b", "d1")
    names.register("a", "d2")
    catalog.names.remove(A)
    assert catalog.blobs.unreferenced(10) == []
    clock.now += timedelta(seconds=60)
    assert catalog.expiry.expire_deleted(timedelta(seconds=60)) == 2
    assert catalog.blobs.unreferenced(10) == ["d2"]
    assert catalog.blobs.take("d2") is not None
    assert catalog.blobs.take("d1") is None
    assert catalog.blobs.digests() == {"d1"}


def test_versions_are_dropped_in_batches(names, catalog, place, clock, monkeypatch):
    monkeypatch.setattr(leftovers, "BATCH_ROWS", 2)
    for number in range(7):
        names.register("a", f"d{number}")
    catalog.names.remove(A)
    with connected(place) as conn:
        assert leftovers.expire_versions(conn, clock.now) == 2, "in one transaction"
    assert catalog.expiry.expire_deleted(timedelta(0)) == 5
    assert len(catalog.blobs.unreferenced(10)) == 7


def test_everything_is_there_after_a_restart(names, catalog, place):
    names.register("a", "d1", labels={"x": "y"}, pinned=True)
    names.register("a", "d2")
    before = names.get("a")
    catalog.close()
    again = Catalog(place, event_retention=1000)
    assert again.names.get(names.ref("a")) == (before, 2)
    assert len(again.history.since(0, 10)) == 2
    again.close()


def test_writers_in_many_threads_leave_no_gap(names, catalog):
    received = ReceivedEvents(catalog)

    def work(thread: int) -> None:
        for i in range(10):
            names.register("shared", f"d{thread}-{i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received.wait(40) == list(range(1, 41))
    assert names.get("shared").version == 40
    assert sorted(e.version for e in catalog.history.since(0, 100)) == list(range(1, 41))
