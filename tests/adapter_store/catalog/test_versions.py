"""A name's versions, and going back to one of them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from adapter_store.catalog.tables import name_changes as changes
from adapter_store.core import EventKind, Pruned
from adapter_store.errors import Conflict
from servicekit.errors import InvalidArgument, NotFound
from servicekit.refs import AdapterName

A = AdapterName("default", "a")
GRACE = timedelta(minutes=10)


@pytest.fixture
def three(names, catalog):
    for digest in ("d1", "d2", "d3"):
        names.register("a", digest)
    return catalog


def shown(catalog, **options):
    page = catalog.names.versions(A, **options)
    return [(r.version, r.digest, r.delete_time is not None) for r in page.records]


def test_versions_newest_first_with_the_deleted(three, clock):
    three.names.remove(A, 3)
    assert shown(three) == [(3, "d3", True), (2, "d2", False), (1, "d1", False)]
    page = three.names.versions(A)
    assert (page.current_version, page.revision, page.next_page_token) == (2, 4, "")
    clock.now += GRACE
    assert shown(three) == [(2, "d2", False), (1, "d1", False)]


def test_versions_of_a_deleted_name(three, clock):
    three.names.remove(A)
    assert [version for version, _, _ in shown(three)] == [3, 2, 1]
    assert three.names.versions(A).current_version == 0
    clock.now += GRACE
    with pytest.raises(NotFound, match="default/a"):
        three.names.versions(A)


def test_versions_in_pages(three, names):
    page = three.names.versions(A, page_size=2)
    assert [r.version for r in page.records] == [3, 2]
    names.register("a", "d4")
    rest = three.names.versions(A, page_size=2, page_token=page.next_page_token)
    assert ([r.version for r in rest.records], rest.next_page_token) == ([1], "")
    names.register("b", "d1")
    for token in (page.next_page_token, "nonsense", "W10"):
        with pytest.raises(InvalidArgument, match="page_token"):
            three.names.versions(AdapterName("default", "b"), page_token=token)


def test_versions_of_what_is_not_there_or_of_another_tenant(three):
    for name, tenants in ((AdapterName("default", "b"), None), (A, frozenset({"other"}))):
        with pytest.raises(NotFound):
            three.names.versions(name, tenants=tenants)


def test_rollback_points_back_with_one_event(three):
    record, revision, *_ = three.names.rollback(A, 1)
    assert (record.version, record.digest, revision) == (1, "d1", 4)
    [event] = three.history.since(3, 10)
    assert (event.kind, event.version, event.digest) == (EventKind.UPDATED, 1, "d1")


def test_rollback_to_what_is_current_changes_nothing(three):
    assert three.names.rollback(A, 3)[1] == 3
    assert three.history.revision() == 3


def test_rollback_moves_the_pin(three, names):
    three.names.set_pinned(names.ref("a"), True, 100)
    assert three.names.rollback(A, 1)[0].pinned
    assert not names.get("a", 3).pinned


def test_rollback_brings_a_deleted_version_back(three, names, clock):
    three.names.remove(A, 1)
    assert three.names.rollback(A, 1)[0].delete_time is None
    assert names.get("a").digest == "d1"
    three.names.remove(A)
    record, revision, *_ = three.names.rollback(A, 2)
    assert (record.version, record.delete_time) == (2, None)
    event = three.history.since(revision - 1, 10)[0]
    assert (event.kind, event.version) == (EventKind.REGISTERED, 2)
    with pytest.raises(NotFound, match="default/a@1"):
        names.get("a", 1)
    three.names.remove(A)
    clock.now += GRACE
    with pytest.raises(NotFound, match="default/a@2"):
        three.names.rollback(A, 2)


def test_rollback_if_current_digest(three, names):
    with pytest.raises(Conflict, match="d3"):
        three.names.rollback(A, 1, "d2")
    assert three.names.rollback(A, 1, "d3")[0].version == 1


def test_rollback_to_what_is_not_there_or_of_another_tenant(three):
    for version, tenants in ((4, None), (1, frozenset({"other"}))):
        with pytest.raises(NotFound, match=f"default/a@{version}"):
            three.names.rollback(A, version, tenants=tenants)


def test_restored_version_with_equal_content_stays_current(three, names):
    """Content that two versions have: registering it again changes nothing."""
    three.names.remove(A, 1)
    assert names.register("a", "d1")[0].version == 4
    three.names.rollback(A, 1)
    record, revision = names.register("a", "d1")
    assert (record.version, revision) == (1, 6)


def live(catalog) -> list[int]:
    return [version for version, _, is_deleted in shown(catalog) if not is_deleted]


def test_a_registration_keeps_so_many(three, names):
    done = three.names.register(names.new("a", "d4"), keep=2)
    assert (done.record.version, done.revision, done.deleted_versions) == (4, 4, (1, 2))
    assert live(three) == [4, 3]
    # One change, one event: those that watch look the name up again, with its versions.
    [event] = three.history.since(3, 10)
    assert (event.kind, event.version) == (EventKind.UPDATED, 4)
    assert three.names.register(names.new("a", "d5"), keep=2).deleted_versions == (3,)


def test_what_is_current_or_pinned_stays(three, names):
    three.names.set_pinned(names.ref("a", 2), True, 100)
    done = three.names.register(names.new("a", "d1"), keep=1)
    assert (done.record.version, done.deleted_versions) == (1, ())
    assert live(three) == [3, 2, 1]
    names.register("a", "d4")
    assert three.names.register(names.new("a", "d5"), keep=1).deleted_versions == (1, 3, 4)
    assert live(three) == [5, 2]


def test_the_same_content_again_deletes_too(three, names):
    done = three.names.register(names.new("a", "d3"), keep=1)
    assert (done.record.version, done.revision, done.deleted_versions) == (3, 4, (1, 2))
    [event] = three.history.since(3, 10)
    assert (event.kind, event.version, event.digest) == (EventKind.UPDATED, 3, "d3")
    again = three.names.register(names.new("a", "d3"), keep=1)
    assert (again.revision, again.deleted_versions) == (4, ())


def test_prune(three, names, clock):
    assert three.names.prune(A, 3) == Pruned((), 3, has_more=False)
    assert three.history.revision() == 3
    assert three.names.prune(A, 1) == Pruned((1, 2), 4, has_more=False)
    assert three.names.rollback(A, 2)[0].version == 2
    assert three.names.prune(A, 1) == Pruned((), 5, has_more=False)
    clock.now += GRACE
    assert live(three) == [3, 2]
    with pytest.raises(NotFound, match="default/b"):
        three.names.prune(AdapterName("default", "b"), 1)
    with pytest.raises(NotFound, match="default/a"):
        three.names.prune(A, 1, frozenset({"other"}))
    three.names.remove(A)
    with pytest.raises(NotFound, match="default/a"):
        three.names.prune(A, 1)


def test_one_transaction_deletes_so_many(three, names, monkeypatch):
    monkeypatch.setattr(changes, "MAX_PRUNED", 1)
    assert three.names.register(names.new("a", "d4"), keep=1).deleted_versions == (1,)
    assert three.names.prune(A, 1) == Pruned((2,), 5, has_more=True)
    assert three.names.prune(A, 1) == Pruned((3,), 6, has_more=True)
    assert three.names.prune(A, 1) == Pruned((), 6, has_more=False)
