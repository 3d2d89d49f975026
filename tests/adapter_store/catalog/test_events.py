from __future__ import annotations

import pytest

from adapter_store.catalog.catalog import Catalog
from adapter_store.errors import RevisionTooOld
from servicekit.refs import AdapterName


def test_events_since_a_revision_in_order_and_bounded(names, catalog):
    for i in range(5):
        names.register(f"n{i}", "d")
    assert [e.revision for e in catalog.history.since(2, 10)] == [3, 4, 5]
    assert [e.revision for e in catalog.history.since(0, 2)] == [1, 2]
    assert catalog.history.since(5, 10) == []


def test_an_empty_catalog_has_an_empty_history(catalog):
    assert catalog.history.revision() == 0
    assert catalog.history.since(0, 10) == []


def test_a_revision_of_another_history_is_refused(names, catalog):
    names.register("a", "d")
    with pytest.raises(RevisionTooOld, match="list again"):
        catalog.history.since(2, 10)


def test_dropped_events_are_an_error(place, names, clock):
    catalog = Catalog(place, event_retention=10, clock=clock)
    for i in range(70):
        catalog.names.register(names.new("a", f"d{i}"))
    assert catalog.history.revision() == 70
    with pytest.raises(RevisionTooOld) as caught:
        catalog.history.since(40, 10)
    assert caught.value.subject == "since_revision"
    assert [e.revision for e in catalog.history.since(60, 100)] == list(range(61, 71))
    catalog.close()


def test_the_revision_survives_forgetting_everything_else(place, names, clock):
    catalog = Catalog(place, event_retention=1, clock=clock)
    for i in range(64):
        catalog.names.register(names.new("a", f"d{i}"))
    catalog.close()
    catalog = Catalog(place, event_retention=1, clock=clock)
    assert catalog.history.revision() == 64
    assert catalog.names.remove(AdapterName("default", "a"))[1] == 65
    catalog.close()


def test_a_failed_write_makes_no_event(names, catalog):
    seen: list[object] = []
    catalog.history.on_change(seen.append)
    with pytest.raises(LookupError), catalog.history.change() as (_conn, _made):
        raise LookupError
    assert seen == []
    assert catalog.history.revision() == 0
    names.register("a", "d")
    assert catalog.history.revision() == 1
